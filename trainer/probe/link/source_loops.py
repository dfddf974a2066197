"""Finds the loops of the script that a thread is in, from its source: which rank has left the training loop."""

import ast
import linecache
import sys
from functools import lru_cache
from itertools import islice

from ....protocol.code_owner import library_of

_DEEPEST = 200
"""Frames that are read of a stack."""


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


@lru_cache(maxsize=64)
def _loops(file: str) -> tuple[tuple[int, int], ...] | None:
    """Return first and last line of every loop of a file; None if it cannot be read."""
    try:
        tree = ast.parse("".join(islice(linecache.getlines(file), 100_000)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.AsyncFor))
    return tuple((node.lineno, node.body[-1].end_lineno or node.lineno) for node in loops)
