"""Control flow of a function, from its bytecode: its loops, and which positions can follow others in one round."""

import bisect
import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

Span = tuple[int, int]
"""First and last position of a loop, byte offsets into the code."""

_ENDS = ("RETURN_", "RAISE_", "RERAISE")
"""Beginnings of the names of instructions that end the function, or go to a handler."""
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD")
"""Beginnings of the names of jumps without a condition."""

_loops: dict[int, tuple[CodeType, list[Span]]] = {}


def loops(code: CodeType) -> list[Span]:
    """Return the first and last position of each loop of a function, from its jumps backward."""
    known = _loops.get(id(code))
    if known is not None and known[0] is code:
        return known[1]
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if "JUMP_BACKWARD" in name and "NO_INTERRUPT" not in name:
            target = int(instruction.argval)
            ends[target] = max(ends.get(target, 0), instruction.offset)
    found = sorted(ends.items())
    _loops[id(code)] = (code, found)
    return found


def within(loop: Span, position: int) -> bool:
    """Return whether a position lies in a loop."""
    return loop[0] <= position <= loop[1]


def can_follow(code: CodeType, first: int, second: int) -> bool:
    """Return whether control can pass from one position to another within one iteration of the loops around both.

    It cannot pass from one branch of an ``if`` to the other, nor past a ``continue``.
    """
    instructions = list(dis.get_instructions(code))
    offsets = [instruction.offset for instruction in instructions]
    around = {loop[0] for loop in loops(code) if within(loop, first) and within(loop, second)}
    goal = _index(offsets, second)
    table: Any = getattr(dis.Bytecode(code), "exception_entries", ())
    handlers = [(entry.start, entry.end, _index(offsets, entry.target)) for entry in table]

    def successors(index: int) -> Iterator[int]:
        instruction = instructions[index]
        name, target = instruction.opname, instruction.argval
        jumps = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if jumps and not ("BACKWARD" in name and target in around):
            yield _index(offsets, int(target))
        if not name.startswith((*_ENDS, *_ALWAYS)):
            yield index + 1
        yield from (handler for start, end, handler in handlers if start <= instruction.offset < end)

    seen: set[int] = set()
    waiting = [_index(offsets, first)]
    while waiting:
        for index in successors(waiting.pop()):
            if index == goal:
                return True
            if index < len(instructions) and index not in seen:
                seen.add(index)
                waiting.append(index)
    return False


def _index(offsets: Sequence[int], position: int) -> int:
    return bisect.bisect_right(offsets, position) - 1
