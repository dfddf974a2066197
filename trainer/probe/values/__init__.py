"""Figures of a step beside time and memory: losses, batches, FLOPs, checksums."""
