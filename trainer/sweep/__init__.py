"""Sweeps: many configurations one after the other, each a run of its own. Nothing here imports torch."""
