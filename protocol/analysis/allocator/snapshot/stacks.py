"""Stacks as people read them."""

from typing import NamedTuple

from ....snapshot.model import Frame, Snapshot


class Tally(NamedTuple):
    """How much a stack holds."""

    bytes: int
    blocks: int


def frame_words(frame: Frame) -> str:
    """Write a frame as ``forward  model.py:59``."""
    where = frame.filename.replace("\\", "/").rpartition("/")[2]
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.name}  {where}{line}" if where and where != "??" else frame.name


def matches(snapshot: Snapshot, stack: int, text: str) -> bool:
    """Return whether a frame of the stack contains the text in its function or file name, in any case."""
    text = text.lower()
    return any(text in frame.name.lower() or text in frame.filename.lower() for frame in snapshot.frames_of(stack))
