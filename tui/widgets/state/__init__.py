"""State shared by the screens, and the model's values as the widgets draw them."""
