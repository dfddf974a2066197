"""Builds reports of failed allocations: the verdict, remedies and the state of all ranks."""
