"""Sweeps: many configurations one after the other, each in a separate run. Nothing here imports torch."""
