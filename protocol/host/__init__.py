"""Processes, memory, devices and private files of this host, for both sides."""
