"""What a rank computes on: the device, its memory figures, its clock, and numbers on their way from it."""
