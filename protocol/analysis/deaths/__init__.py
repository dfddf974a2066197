"""Failures and deaths of processes, and their causes."""
