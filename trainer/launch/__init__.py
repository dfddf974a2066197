"""Starts a run: its options, its launcher, and the hosts that join it."""
