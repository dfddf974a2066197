"""Start and end of a rank: how a process of the job becomes one, and its last messages."""
