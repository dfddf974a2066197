"""Hangs and stragglers: time limits of phases, activity of process trees, verdicts, proof that a wait cannot end."""
