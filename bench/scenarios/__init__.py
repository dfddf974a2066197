"""Stalls and deaths of real ranks, one after the other, and what ftmon says of each: ``python -m bench.scenarios``."""
