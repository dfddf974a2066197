"""The messages of a run and their parts; ``wire`` is the envelope."""
