"""Composition of the peak of each phase: pure arithmetic on a step's trace and the storages found by walking."""
