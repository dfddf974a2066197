"""Ends processes: escalating signals, verified kills, leftovers of finished runs."""
