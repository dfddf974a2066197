"""Finds the loops of the script that a thread is in, from its source: which rank has left the training loop."""

import ast
import sys
import threading
from pathlib import Path

from ....protocol.code_owner import library_of

_DEEPEST = 200
"""Frames that are read of a stack."""
READ_SECONDS = 0.2
"""A source is waited for so long: its disk may be what the rank hangs on, and the stacks must arrive."""
_Loops = tuple[tuple[int, int], ...]
_read: dict[str, "_Loops | None"] = {}
"""First and last line of every loop of a file; None: it is being read, or cannot be read."""


def around(thread: int) -> dict[str, list[tuple[int, int]]]:
    """Return the loops around each line of the script on a thread's stack: first and last line, innermost first.

    The key is the file and the line, as ``Frame.key``. Lines outside any loop have an empty list; those of libraries,
    and of files that cannot be read, are left out.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    frame = sys._current_frames().get(thread)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not library_of(file) and (loops := _loops(file)) is not None:
            inside = [loop for loop in loops if loop[0] <= line <= loop[1]]
            found[f"{file}:{line}"] = sorted(inside, key=lambda loop: loop[1] - loop[0])
        frame = frame.f_back
    return found


def _loops(file: str) -> _Loops | None:
    """Return first and last line of every loop of a file; None if it cannot be read in time."""
    if file not in _read:
        _read[file] = None
        reader = threading.Thread(target=_parse, args=(file,), name="ftmon-source", daemon=True)
        reader.start()
        reader.join(READ_SECONDS)
    return _read[file]


def _parse(file: str) -> None:
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor))
    _read[file] = tuple((node.lineno, node.body[-1].end_lineno or node.lineno) for node in loops)
