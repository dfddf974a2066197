"""Composition of the peak of each phase, from a step's trace and the storages found by walking."""
