"""PyTorch's caching allocator: its snapshots, and a model of its rules."""
