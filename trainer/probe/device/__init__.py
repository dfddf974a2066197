"""A rank's device: its memory figures, its clock, and numbers in transfer from it."""
