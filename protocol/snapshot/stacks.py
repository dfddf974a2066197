"""Stacks as people read them: whose code a frame is, and how it is written."""

import re
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


def matches(snapshot: Snapshot, stack: int, text: str) -> bool:
    """Tell whether a frame of the stack contains the text in its function or file name, in any case."""
    text = text.lower()
    return any(text in frame.name.lower() or text in frame.filename.lower() for frame in snapshot.frames_of(stack))
