"""What goes wrong around a training that goes on, drawn from a seed: ``python -m bench.chaos``."""
