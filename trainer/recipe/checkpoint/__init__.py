"""Checkpoints to resume from: written whole or not at all, and restored exactly."""
