"""The hub's worker: makes messages of traces of captured steps.

Its standard input is a socket of ``multiprocessing.Pipe``, by which it receives each ``StepTrace`` as encoded by its
rank, and sends a ``Found`` in return. It ends when the hub closes the other end, or ends.
"""

import os
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec

from ...protocol.analysis.allocator.composition import messages_of
from ...protocol.errors import ProtocolError
from ...protocol.messages import wire
from ...protocol.messages.memory import Composition, StepTrace
from ...protocol.messages.telemetry import AllocatorEvents

_NICE = 10  # Niceness of the worker, so that training has precedence


class Found(msgspec.Struct, frozen=True):
    """Result of one trace."""

    messages: list[AllocatorEvents | Composition] = []
    error: str = ""  # Why there is no result; empty otherwise


def find(body: bytes) -> Found:
    """Return the messages computed from an encoded ``StepTrace``."""
    try:
        trace = wire.decode_body(body)
        if not isinstance(trace, StepTrace):
            return Found(error="it is no trace of a step")
        return Found(messages_of(trace))
    except (ProtocolError, ValueError, TypeError, LookupError, OverflowError) as error:
        # Inconsistent columns, which only a manipulated message has.
        return Found(error=f"{type(error).__name__}: {error}")


def main() -> None:
    """Serve until the hub ends."""
    os.nice(_NICE)
    hub = Connection(0)
    with suppress(EOFError, OSError):
        while True:
            hub.send_bytes(msgspec.msgpack.encode(find(hub.recv_bytes())))


if __name__ == "__main__":
    main()
