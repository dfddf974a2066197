"""What the training loop does, as hooks see it: micro-steps, updates, and the phases they are."""
