"""Evaluation during training: loss on examples that are not trained on, early stopping, sample generations."""
