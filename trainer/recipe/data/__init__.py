"""Training data: from records in files or on the hub to batches of token ids, labels and positions."""
