"""Estimates for a configuration, from counts: memory, time, host, disk, money, and their curves."""
