"""Samples and checks of this host's hardware: GPUs, memory, disks, the kernel's log."""
