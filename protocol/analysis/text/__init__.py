"""Text that is not of a kind of finding: memory curves, predictions, and the types of all texts."""
