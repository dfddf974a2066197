"""Inspects ranks without their cooperation: activity, stacks, locks, traffic."""
