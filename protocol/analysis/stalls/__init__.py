"""Hangs: how long a phase may last, whether a process tree works, and what proves that a wait cannot end."""
