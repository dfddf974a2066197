"""The phases and steps of the training thread."""
