"""Functions of PyTorch, DeepSpeed and transformers that the probe wraps."""
