"""Stochastic rounding from fp32 to bf16, with random bits that are computed and not drawn.

A value between two neighbours in bf16 becomes the upper one with a probability equal to its relative distance from the
lower one, so its mean is the value. Updates below half a bf16 step are lost with rounding to nearest, and kept on
average here.

The random bits are a hash of seed, step, tensor and position: they are the same on every device, compiled or not, need
no state for a resume, and run under fake tensors like any other arithmetic.
"""

import torch

_MASK = 0xFFFFFFFF
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - (1 << 32)
"""Multipliers of the 32-bit hash lowbias32 (https://nullprogram.com/blog/2018/07/31/), as signed integers."""
_UPPER = -65536
"""Mask of the bits of an fp32 number that bf16 keeps: 0xFFFF0000."""


def salt(*numbers: int) -> int:
    """Return a signed 32-bit integer hashed from integers, such as seed, step, tensor and chunk."""
    value = 0
    for number in numbers:
        # splitmix64's finalizer, over all bits of each number.
        value = (value + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    low = value & _MASK
    return low - (1 << 32) if low >= 1 << 31 else low


def random_bits(positions: torch.Tensor, salted: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each position.

    Args:
        positions: int32; 0, 1, 2, ...
        salted: int32 scalar on the same device (see ``salt``).
    """
    bits = positions ^ salted
    # Shifts of signed integers copy the sign: the mask makes them logical. Products wrap around.
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FIRST
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _SECOND
    return bits ^ ((bits >> 16) & 0xFFFF)


def to_bfloat16(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 stochastically.

    Args:
        value: fp32.
        bits: int32 of the same shape; the lower 16 of each are used.
    """
    rounded = ((value.view(torch.int32) + (bits & 0xFFFF)) & _UPPER).view(torch.float32)
    # A carry would turn some NaN into a number.
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)
