"""The end of a run: detection, sequence, files of out-of-memory errors."""
