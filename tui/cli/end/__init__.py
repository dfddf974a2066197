"""Commands that end a run: kill, stop, cleanup."""
