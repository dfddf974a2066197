"""Sockets and keys between a hub and its clients."""
