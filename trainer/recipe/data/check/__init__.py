"""What the model will see: a report on the training data before a run."""
