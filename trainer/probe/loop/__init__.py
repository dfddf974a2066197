"""The training loop as hooks see it: micro-steps, updates, and their phases."""
