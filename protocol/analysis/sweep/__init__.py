"""Judgement of sweeps: which configuration to run next, what is left of a budget, results from the rows."""
