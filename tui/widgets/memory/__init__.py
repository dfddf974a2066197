"""The memory and allocator screens as lines."""
