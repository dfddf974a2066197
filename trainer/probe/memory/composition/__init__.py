"""What the peak of each phase consists of."""
