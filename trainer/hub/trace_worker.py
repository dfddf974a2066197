"""The hub's worker: reads traces of captured steps from standard input, writes the resulting messages to its output.

In both directions a frame is its length (4 bytes, little-endian) and that many bytes: a ``StepTrace`` as encoded by its
rank, and a ``Found`` in return. The worker ends at the end of its input, that is, when the hub ends.
"""

import os
import struct
import sys
from contextlib import suppress
from typing import IO

import msgspec

from ...protocol.analysis.allocator.composition import messages_of
from ...protocol.errors import ProtocolError
from ...protocol.messages import wire
from ...protocol.messages.memory import Composition, StepTrace
from ...protocol.messages.telemetry import AllocatorEvents

_LENGTH = struct.Struct("<I")
_NICE = 10  # Niceness of the worker, so that training has precedence


class Found(msgspec.Struct, frozen=True):
    """Result of one trace."""

    messages: list[AllocatorEvents | Composition] = []
    error: str = ""
    """Why there is no result; empty otherwise."""


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Write one frame. Raises ``OSError`` if the other side has closed the pipe."""
    file.write(_LENGTH.pack(len(data)) + data)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Read one frame; return None at the end of the file, also if it ends within a frame."""
    head = file.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = file.read(length)
    return data if len(data) == length else None


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
    """Serve until the input ends."""
    os.nice(_NICE)
    encode = msgspec.msgpack.Encoder().encode
    with suppress(BrokenPipeError):
        while (body := read_frame(sys.stdin.buffer)) is not None:
            write_frame(sys.stdout.buffer, encode(find(body)))


if __name__ == "__main__":
    main()
