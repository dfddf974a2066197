"""Standard output and error: sanitised text, and the terminal's capabilities."""
