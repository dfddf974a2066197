"""Judgement of sweeps: which configuration to run next, what is left of a budget, what the rows say."""
