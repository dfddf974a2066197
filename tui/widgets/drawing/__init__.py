"""Lines, colours, glyphs and figures: what every widget is painted with."""
