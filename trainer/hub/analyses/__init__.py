"""Runs the analysis on the stream, and traces and predictions in processes of their own."""
