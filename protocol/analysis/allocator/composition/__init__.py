"""What the peak of each phase consists of: pure arithmetic on a step's trace and on what was seen where."""
