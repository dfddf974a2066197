"""Out-of-memory errors in a rank: the report, the hold and its console."""
