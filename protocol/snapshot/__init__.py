"""Files of memory snapshots: a restricted reader, and their content as columns."""
