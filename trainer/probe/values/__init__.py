"""Figures of a step other than time and memory: losses, batches, FLOPs."""
