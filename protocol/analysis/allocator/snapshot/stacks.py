"""Text of stacks."""

from typing import NamedTuple

from ....snapshot.model import Frame, Snapshot


class Tally(NamedTuple):
    """Memory held by a stack."""

    bytes: int
    blocks: int


def frame_words(frame: Frame) -> str:
    """Return a frame as text: ``forward  model.py:59``."""
    where = frame.filename.replace("\\", "/").rpartition("/")[2]
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.name}  {where}{line}" if where and where != "??" else frame.name


def matches(snapshot: Snapshot, stack: int, text: str) -> bool:
    """Return whether a frame of the stack has the text in its function or file name, ignoring case."""
    text = text.lower()
    return any(text in frame.name.lower() or text in frame.filename.lower() for frame in snapshot.frames_of(stack))
