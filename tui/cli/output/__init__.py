"""Standard output and error: sanitised text, and what the terminal can show."""
