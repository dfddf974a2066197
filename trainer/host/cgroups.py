"""The control groups that count a process's memory; ``protocol.host_memory`` reads them."""

from ...protocol.host_memory import memory_hierarchies

__all__ = ["memory_hierarchies"]
