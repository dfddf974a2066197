"""Faults that raise no error: the run goes on, and the model does not learn what was meant."""
