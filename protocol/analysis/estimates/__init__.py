"""Estimates for a configuration: memory, time, host memory, disk space, cost, and their curves."""
