"""Meanings of NVIDIA's XID numbers for training (docs.nvidia.com/deploy/xid-errors)."""

from typing import Literal

IGNORED = frozenset((45,))
"""Preemptive cleanup: the driver closes the channels of a process that was killed or failed before."""

_OF_THE_PROGRAM = {
    13: "an illegal instruction or address in a kernel, of the program most often",
    31: "a memory page fault of a kernel: an illegal address, of the program most often",
    43: "a program's channel was stopped after a fault of its own",
    68: "a fault of the video decoder",
}
_OF_THE_DEVICE = {
    48: "an uncorrectable (double bit) memory error",
    61: "an internal micro-controller halt",
    62: "an internal micro-controller halt",
    63: "a memory row was remapped",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "a high rate of correctable memory errors",
    94: "a contained uncorrectable memory error: the program using that memory is ended",
    95: "an uncontained uncorrectable memory error: the GPU must be reset",
    109: "a context switch timed out",
    119: "the GPU's system processor (GSP) does not answer",
    120: "the GPU's system processor (GSP) failed",
    140: "an unrecovered memory error",
    149: "an NVLink fault",
}
_MILD = frozenset((63, 92))


def meaning(code: int) -> tuple[str, Literal["warning", "error"]]:
    """Return the meaning of an XID, as text, and its severity."""
    if code in _OF_THE_DEVICE:
        return _OF_THE_DEVICE[code], "warning" if code in _MILD else "error"
    return _OF_THE_PROGRAM.get(code, "see NVIDIA's list of XID errors"), "warning"


def of_the_program(code: int) -> bool:
    """Return whether the program, not the device, is the likely cause."""
    return code in _OF_THE_PROGRAM
