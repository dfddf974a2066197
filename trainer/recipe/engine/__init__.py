"""DeepSpeed: its configuration and the process group of its ranks."""
