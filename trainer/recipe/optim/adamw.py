"""AdamW with running averages of 2 bytes or 1 per element, and optionally bf16 parameters without an fp32 copy.

The update is computed in fp32 and elementwise, so it works on flat partitions of ZeRO as on whole parameters. It
processes a tensor in pieces, so temporaries do not grow with the model; compiled, each piece is one kernel. Smaller
tensors are copied together into one piece: launching a kernel for each would take longer than the copies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad

# 8-bit states: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861): 256 elements share a
# scale, their largest magnitude, and each is one of 256 values of a dynamic tree code, whose spacing is relative over
# seven decades. There are two differences. Codes are rounded stochastically: to nearest, a running average would not
# change if its change in a step is below half a spacing (with beta2 = 0.999 it falls by 0.1 % a step at most, and codes
# are 1 % and more apart). And the root of the running square is stored, which doubles its range; a positive one never
# becomes 0, which would make the step huge.

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
    """Return fp32 values of ``codes``, uint8 ``[n]``, with ``scales``, fp32 ``[ceil(n / BLOCK)]``, and a ``code``."""
    values = torch.index_select(table, 0, codes.to(torch.int32))
    return (_blocks(values) * scales[:, None]).flatten()[: codes.numel()]


def encode(values: torch.Tensor, bits: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of fp32 values ``[n]``, rounded stochastically between neighbouring codes.

    ``bits`` are int32 ``[n]``, random; the lower 16 of each are used. ``table``: a ``code``.
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


# Stochastic rounding from fp32 to bf16: the mean is the value, and updates below half a bf16 step are kept on average.
# The random bits are a hash of seed, step, tensor and position: they are the same on every device, compiled or not,
# need no state for a resume, and run under fake tensors like any other arithmetic.

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
    """Return 32 random bits for each position (int32); ``salted``: an int32 scalar on the same device (``salt``)."""
    bits = positions ^ salted
    # Shifts of signed integers copy the sign: the mask makes them logical. Products wrap around.
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * _FIRST
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * _SECOND
    return bits ^ ((bits >> 16) & 0xFFFF)


def to_bfloat16(value: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 stochastically; of ``bits``, int32 of the same shape, the lower 16 are used."""
    rounded = ((value.view(torch.int32) + (bits & 0xFFFF)) & _UPPER).view(torch.float32)
    # A carry would turn some NaN into a number.
    return torch.where(value.isnan(), value, rounded).to(torch.bfloat16)


_aten: Any = torch.ops.aten
States = Literal["bf16", "8bit"]
_PIECE = 1 << 23
"""Elements updated at once: 32 MiB for each fp32 temporary. A multiple of a quantization block."""
_COMPILED_PIECE = 1 << 25
"""The same for compiled pieces, which have no temporaries unless PyTorch falls back to eager mode."""
_COMPILED_LEAST = 1 << 12
"""Smaller tensors are not worth a kernel of their own, and their sizes would cause recompilations."""
_AVERAGES = ("exp_avg", "exp_avg_sq")
_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")


class _Part(NamedTuple):
    parameter: torch.Tensor
    state: dict[str, Any]
    place: int

    def tensors(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the flat states of these names."""
        return [self.state[name].view(-1) for name in names]


class SmallStateAdamW(torch.optim.Optimizer):
    """AdamW with running averages in bf16 or in 8 bits, rounded stochastically.

    Parameters are in fp32, or in bf16 and then rounded stochastically too. ``seed`` is that of the rounding: ranks that
    update the same parameters need the same. ``compiled``: update each piece with one kernel made by torch.compile.
    """

    def __init__(
        self,
        groups: Any,
        *,
        states: States,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        seed: int,
        compiled: bool = False,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._states: States = states
        self._seed = seed
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._piece = _COMPILED_PIECE if compiled else _PIECE
        self._update: Callable[..., None] = _update_8bit if states == "8bit" else _update_bf16
        self.compiled_update = torch.compile(self._update, dynamic=True) if compiled else None
        """Updates a piece in place, without temporaries; None: pieces are not compiled."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step; parameters without a gradient are not changed."""
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self.update()
        return loss

    @torch.no_grad()
    def update(self) -> None:
        """Update every parameter that has a gradient; hooks that count an optimizer's steps do not see it."""
        for number, group in enumerate(self.param_groups):
            # Parameters with equal arguments of the update, in their order.
            alike: dict[Any, list[_Part]] = {}
            for place, parameter in enumerate(group["params"]):
                if parameter.grad is None:
                    continue
                state: dict[str, Any] = self.state[parameter]
                if not state:
                    state.update(self._fresh(parameter))
                state["step"] += 1
                key = (int(state["step"]), parameter.device, parameter.dtype, parameter.grad.dtype)
                alike.setdefault(key, []).append(_Part(parameter, state, place))
            for (step, device, *_), parts in alike.items():
                scalars = _scalars(group, step, device)
                for bundle in self._bundles(parts):
                    self._step(bundle, scalars, (self._seed, step, number, bundle[0].place))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states in their own data types; PyTorch would convert them to the parameters'."""
        super().load_state_dict({**state_dict, "state": {}})
        here = [parameter for group in self.param_groups for parameter in group["params"]]
        there = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(there, here, strict=True):
            if key not in state_dict["state"]:
                continue
            loaded: dict[str, Any] = {}
            for name, value in state_dict["state"][key].items():
                device = "cpu" if name == "step" else parameter.device
                loaded[name] = value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
            self.state[parameter] = loaded

    def _bundles(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Yield groups of parameters that are updated together, as many as fit a piece."""
        bundle: list[_Part] = []
        elements = 0
        for part in parts:
            count = part.parameter.numel()
            whole_blocks = self._states == "bf16" or count % BLOCK == 0
            if not (part.parameter.is_contiguous() and whole_blocks):
                yield [part]
                continue
            if bundle and elements + count > self._piece:
                yield bundle
                bundle, elements = [], 0
            bundle.append(part)
            elements += count
        if bundle:
            yield bundle

    def _step(self, bundle: list[_Part], scalars: list[torch.Tensor], numbers: tuple[int, ...]) -> None:
        """Update the parameters of a bundle; ``numbers``: arguments of its rounding, besides its size."""
        names = (*_AVERAGES, *(_SCALES if self._states == "8bit" else ()))
        parameters = [part.parameter.reshape(-1) for part in bundle]
        gradients = [part.parameter.grad.reshape(-1) for part in bundle if part.parameter.grad is not None]
        states = [list(tensors) for tensors in zip(*(part.tensors(names) for part in bundle), strict=True)]
        if len(bundle) == 1:
            flat = [parameters[0], gradients[0], *(tensors[0] for tensors in states)]
        else:
            flat = [torch.cat(tensors) for tensors in (parameters, gradients, *states)]
        self._in_pieces(flat[0], flat[1], flat[2:4], flat[4:], scalars, numbers)
        if len(bundle) > 1:
            for tensors, made in zip((parameters, *states), (flat[0], *flat[2:]), strict=True):
                _aten._foreach_copy_(tensors, made.split([len(tensor) for tensor in tensors]))
        elif not bundle[0].parameter.is_contiguous():  # its flat form is a copy
            bundle[0].parameter.copy_(flat[0].view(bundle[0].parameter.shape))

    def _in_pieces(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        averages: list[torch.Tensor],
        scales: list[torch.Tensor],
        scalars: list[torch.Tensor],
        numbers: tuple[int, ...],
    ) -> None:
        device, count = parameter.device, len(parameter)
        update = self._update if self.compiled_update is None or count < _COMPILED_LEAST else self.compiled_update
        for piece, start in enumerate(range(0, count, self._piece)):
            end = min(count, start + self._piece)
            # Filled on the device: a copy from the host would block the host.
            salted = torch.full((), salt(*numbers, count, piece), dtype=torch.int32, device=device)
            arguments = (parameter[start:end], gradient[start:end], scalars, salted)
            here = [average[start:end] for average in averages]
            if self._states == "8bit":
                blocked = slice(start // BLOCK, -(-end // BLOCK))
                if device not in self._tables:
                    self._tables[device] = (code(True, device), code(False, device))
                update(*arguments, here, [scale[blocked] for scale in scales], self._tables[device])
            else:
                update(*arguments, here)

    def _fresh(self, parameter: torch.Tensor) -> dict[str, Any]:
        device, eight = parameter.device, self._states == "8bit"
        state: dict[str, Any] = {"step": torch.tensor(0.0)}
        for name in _AVERAGES:
            state[name] = torch.zeros(parameter.shape, dtype=torch.uint8 if eight else torch.bfloat16, device=device)
            if eight:
                # Where the scale is 0, any code is 0.
                state[name + "_scale"] = torch.zeros(-(-parameter.numel() // BLOCK), device=device)
        return state


def compiles(device: torch.device, states: States) -> bool:
    """Return whether torch.compile works here for the update of these states.

    It needs Triton and a C compiler; with TORCHDYNAMO_DISABLE=1 it returns the function unchanged.
    """
    weight = torch.nn.Parameter(torch.zeros(2 * _COMPILED_LEAST, dtype=torch.bfloat16, device=device))
    weight.grad = torch.ones_like(weight)
    try:
        trial = SmallStateAdamW([weight], states=states, lr=1.0, betas=(0.9, 0.9), eps=1e-8, seed=0, compiled=True)
        if trial.compiled_update in (_update_bf16, _update_8bit):
            return False
        trial.update()
    except Exception:  # a missing compiler or Triton, or an old driver, raises many types
        return False
    return True


def _scalars(group: dict[str, Any], step: int, device: torch.device) -> list[torch.Tensor]:
    """Return the arguments of ``_adamw`` as tensors, so that a kernel is not recompiled for each value."""
    beta1, beta2 = group["betas"]
    values = (
        1.0 - group["lr"] * group["weight_decay"],
        group["lr"] / (1.0 - beta1**step),
        1.0 - beta1,
        1.0 - beta2,
        (1.0 - beta2**step) ** -0.5,
        group["eps"],
    )
    return [torch.full((), value, dtype=torch.float32, device=device) for value in values]


def _adamw(
    parameter: torch.Tensor, gradient: torch.Tensor, mean: torch.Tensor, square: torch.Tensor, scalars: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return parameter, running mean and running square after a step, all fp32 (arXiv 1711.05101)."""
    decay, rate, part1, part2, correction, eps = scalars
    gradient = gradient.float()
    mean = mean + part1 * (gradient - mean)
    square = square + part2 * (gradient * gradient - square)
    return parameter.float() * decay - rate * mean / (square.sqrt() * correction + eps), mean, square


def _bits(like: torch.Tensor, salted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three independent tensors with 16 random bits per element, in the lower halves."""
    first = random_bits(torch.arange(like.numel(), dtype=torch.int32, device=like.device), salted)
    # A hash of a hash: the upper half of the first is independent of its lower one.
    return first, first >> 16, random_bits(first, salted)


def _store(parameter: torch.Tensor, value: torch.Tensor, bits: torch.Tensor) -> None:
    parameter.copy_(to_bfloat16(value, bits) if parameter.dtype == torch.bfloat16 else value)


def _update_bf16(
    parameter: torch.Tensor, gradient: torch.Tensor, scalars: Any, salted: torch.Tensor, averages: Any
) -> None:
    updated, mean, square = _adamw(parameter, gradient, averages[0].float(), averages[1].float(), scalars)
    bits = _bits(parameter, salted)
    _store(parameter, updated, bits[0])
    _store(averages[0], mean, bits[1])
    _store(averages[1], square, bits[2])


def _update_8bit(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    scalars: Any,
    salted: torch.Tensor,
    averages: Any,
    scales: Any,
    tables: Any,
) -> None:
    root = decode(averages[1], scales[1], tables[1])
    mean = decode(averages[0], scales[0], tables[0])
    updated, mean, square = _adamw(parameter, gradient, mean, root * root, scalars)
    bits = _bits(parameter, salted)
    _store(parameter, updated, bits[0])
    codes, scale = encode(mean, bits[1], tables[0])
    averages[0].copy_(codes)
    scales[0].copy_(scale)
    root = square.sqrt()
    codes, scale = encode(root, bits[2], tables[1])
    # A positive root has at least the smallest positive code.
    averages[1].copy_(torch.where(root > 0, codes.clamp(min=1), codes))
    scales[1].copy_(scale)
