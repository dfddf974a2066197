"""Block-wise 8-bit quantization of optimizer states.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): 256 elements share a scale, their
largest magnitude, and each is one of 256 values of a dynamic tree code, whose spacing is relative over seven decades.

There are two differences. Codes are rounded stochastically between the two neighbours: to nearest, a running average
would not change if its change in a step is below half a spacing (with beta2 = 0.999 it falls by 0.1 % a step at most,
and codes are 1 % and more apart). And the root of the running square is stored, which doubles its range; a positive
one never becomes 0, which would make the step huge.
"""

import torch
from torch.nn.functional import pad

BLOCK = 256
_DECADES = 7


def code(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 values of the dynamic tree code in ascending order, fp32, from -1 or 0 to 1.

    A byte's leading zeros are the decade, the bits after the first one the position in it, from 0.1 to 1.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        # An unsigned code uses the sign's bit for the position.
        count = 1 << (decade + (0 if signed else 1))
        width = 0.9 / count
        places = [0.1 + width * (place + 0.5) for place in range(count)]
        values += [place * 10.0 ** (decade - _DECADES + 1) for place in places]
    if signed:
        values += [-value for value in values if 0.0 < value < 1.0]
    values.sort()
    if signed:
        values[0] = -1.0  # the largest magnitude of a block may be negative
    return torch.tensor(values, dtype=torch.float32, device=device)


def decode(codes: torch.Tensor, scales: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return fp32 values.

    Args:
        codes: uint8 ``[n]``.
        scales: fp32 ``[ceil(n / BLOCK)]``.
        table: 256 values (``code``).
    """
    values = torch.index_select(table, 0, codes.to(torch.int32))
    return (_blocks(values) * scales[:, None]).flatten()[: codes.numel()]


def encode(values: torch.Tensor, bits: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of fp32 values, rounded stochastically between neighbouring codes.

    Args:
        values: fp32 ``[n]``.
        bits: int32 ``[n]``, random; the lower 16 of each are used.
        table: 256 values (``code``).
    """
    blocks = _blocks(values)
    scales = blocks.abs().amax(dim=1)
    # A block of zeros stays zero: any code times 0.
    share = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).flatten()[: values.numel()]
    below = (torch.bucketize(share, table, out_int32=True, right=True) - 1).clamp(0, 254)
    low = torch.index_select(table, 0, below)
    high = torch.index_select(table, 0, below + 1)
    step = high - low
    place = torch.where(step > 0, (share - low) / torch.where(step > 0, step, 1.0), 0.0)
    up = (bits & 0xFFFF).to(torch.float32) < place * 65536.0
    return (below + up.to(torch.int32)).to(torch.uint8), scales


def _blocks(values: torch.Tensor) -> torch.Tensor:
    rest = -values.numel() % BLOCK
    return (pad(values, (0, rest)) if rest else values).view(-1, BLOCK)
