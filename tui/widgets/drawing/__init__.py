"""Lines, colours, glyphs and number formats of all widgets."""
