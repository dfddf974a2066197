"""A run: its directory and options, the request that starts it, and its end."""
