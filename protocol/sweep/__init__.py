"""Results of a sweep: what was asked for, one row for each run, and how it ended, in one append-only file."""
