"""A run: its directory and options, the request that starts it, its end."""
