"""Stacks as people read them: whose code a frame is, and trees of stacks with bytes and counts."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from .model import Frame, Snapshot

_INSTALLED = re.compile(r"(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/")
_NATIVE = re.compile(r"(^|/)\?\?$|\.(so[.\d]*|cpp|cc|cu|c|h|hpp|cuh)$")
_LIBRARIES = frozenset(
    {
        "accelerate", "apex", "bitsandbytes", "datasets", "deepspeed", "flash_attn", "ftmon", "liger_kernel",
        "lightning", "megatron", "numpy", "peft", "pytorch_lightning", "ray", "torch", "torchaudio", "torchvision",
        "transformer_engine", "transformers", "triton", "trl", "unsloth", "xformers",
    }
)  # fmt: skip
"""Told by a directory of their name too, since they are also run from checkouts and unusual places."""


class Tally(NamedTuple):
    """How much a stack holds."""

    bytes: int
    blocks: int


@cache
def library_of(filename: str) -> str:
    """Name the third-party package a file belongs to; empty for the person's own code."""
    filename = filename.replace("\\", "/")
    if found := _INSTALLED.search(filename):
        return found[1].removesuffix(".py")
    if filename.startswith("<") or _STANDARD.search(filename):
        return "python"
    if not filename or _NATIVE.search(filename):
        return "native"
    return next((part for part in reversed(filename.split("/")[:-1]) if part in _LIBRARIES), "")


def frame_words(frame: Frame) -> str:
    """Write a frame as ``forward  model.py:59``."""
    where = frame.filename.replace("\\", "/").rpartition("/")[2]
    line = f":{frame.line}" if frame.line else ""
    return f"{frame.name}  {where}{line}" if where and where != "??" else frame.name


class Node:
    """A call, or a run of library calls folded into one, and what was allocated at it and below."""

    __slots__ = ("blocks", "bytes", "children", "frames")

    def __init__(self, frames: tuple[int, ...]) -> None:
        self.frames = frames
        """Frame indices, outermost first; more than one where library frames are folded."""
        self.bytes = 0
        self.blocks = 0
        self.children: dict[tuple[int, ...], Node] = {}

    def ordered(self) -> list["Node"]:
        """List what lies below, most bytes first (for a difference: furthest from zero)."""
        return sorted(self.children.values(), key=lambda node: (-abs(node.bytes), -node.blocks))


def stack_tree(snapshot: Snapshot, tallies: Mapping[int, Tally], fold: bool = True, find: str = "") -> Node:
    """Make the tree of stacks, outermost calls at its root.

    Args:
        snapshot: whose stacks these are.
        tallies: bytes and counts by stack.
        fold: make one node of each run of library frames.
        find: keep only stacks with a frame whose function or file contains this, in any case.
    """
    root = Node(())
    library = [bool(library_of(frame.filename)) for frame in snapshot.frames] if fold else []
    for stack, tally in tallies.items():
        if find and not matches(snapshot, stack, find):
            continue
        node = root
        node.bytes += tally.bytes
        node.blocks += tally.blocks
        for key in _path(snapshot.stacks[stack], library):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key)
            node = child
            node.bytes += tally.bytes
            node.blocks += tally.blocks
    return root


def matches(snapshot: Snapshot, stack: int, text: str) -> bool:
    """Tell whether a frame of the stack contains the text in its function or file name, in any case."""
    text = text.lower()
    return any(text in frame.name.lower() or text in frame.filename.lower() for frame in snapshot.frames_of(stack))


def _path(stack: list[int], library: list[bool]) -> Iterable[tuple[int, ...]]:
    if not library:
        return [(frame,) for frame in reversed(stack)]
    path: list[tuple[int, ...]] = []
    run: list[int] = []
    for frame in reversed(stack):
        if library[frame]:
            run.append(frame)
            continue
        if run:
            path.append(tuple(run))
            run = []
        path.append((frame,))
    return [*path, tuple(run)] if run else path


def node_words(snapshot: Snapshot, node: Node) -> str:
    """Say what a node stands for: a call, or the innermost of a run of library calls."""
    if not node.frames:
        return "everything"
    innermost = snapshot.frames[node.frames[-1]]
    more = len(node.frames) - 1
    if not more:
        return frame_words(innermost)
    names = dict.fromkeys(library_of(snapshot.frames[frame].filename) for frame in reversed(node.frames))
    names.pop("", None)
    return f"{frame_words(innermost)}  (+{more} frames in {', '.join(list(names)[:3])})"
