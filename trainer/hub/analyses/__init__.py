"""Runs the analysis of the stream, and trace analysis and predictions in separate processes."""
