"""Spikes, growth and leaks of a rank's memory, their causes and remedies."""
