"""The jobs of a run and their figures."""
