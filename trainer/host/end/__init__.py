"""Ending processes: signals in steps, kills that are verified, leftovers of finished runs."""
