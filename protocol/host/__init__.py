"""Processes, memory, devices and private files of this host, as both sides see them."""
