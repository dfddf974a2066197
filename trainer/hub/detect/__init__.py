"""Detectors that observe processes and ports."""
