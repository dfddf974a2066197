"""Graphs, bars and sparklines."""
