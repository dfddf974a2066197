"""Memory snapshot files: a restricted reader, and their content as columns."""
