"""Base classes of the widgets: canvas, list, prompt and the panes of every screen."""
