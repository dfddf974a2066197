"""Composition of the peak of each phase."""
