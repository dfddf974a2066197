"""Comparing runs and sweeps: what differs by more than its noise."""
