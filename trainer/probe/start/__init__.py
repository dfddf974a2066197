"""A process of the job becomes a rank, and ends."""
