"""What a rank does, without its help: activity, stacks, locks, traffic."""
