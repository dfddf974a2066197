"""Shared by both sides: messages, wire, sockets, keys, run directory, recording file, snapshot format.

Nothing in here imports torch or textual. ``docs/protocol.md`` is the specification this package implements.
"""
