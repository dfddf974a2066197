"""State shared by the screens, and the model's values in the widgets' form."""
