"""Results of a sweep: the request, one row per run, and the sweep's end, in one append-only file."""
