"""Memory snapshots of PyTorch's CUDA allocator: reading, replay and analysis."""
