"""Real faults, made at one step of one rank, to see what the monitor reports about them."""
