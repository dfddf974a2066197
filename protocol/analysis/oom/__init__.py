"""Explains failed allocations: why they failed, and what would make them fit."""
