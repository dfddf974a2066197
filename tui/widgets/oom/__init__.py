"""The report of an out-of-memory error, its what-if table and its console."""
