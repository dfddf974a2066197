"""Report on the training data before a run."""
