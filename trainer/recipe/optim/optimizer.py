"""Makes the configured variant of AdamW. The variants differ in their temporaries, and so in peak memory."""

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from ....protocol.errors import ConfigError
from ..config.schema import Config, Optimizer, Schedule
from ..distributed import World
from ..monitor import activity
from ..support import SMALL_STATES, learning_rate, zero_stage
from .adamw import SmallStateAdamW, compiles, salt


def warmup_steps(schedule: Schedule, total_steps: int) -> int:
    """Return the number of steps of the warm-up."""
    steps = schedule.warmup_steps
    return int(schedule.warmup_ratio * total_steps) if steps == "auto" else steps


def factor(schedule: Schedule, step: int, total_steps: int) -> float:
    """Return the learning rate of a step (from 0) as a share of the peak rate."""
    warmup = warmup_steps(schedule, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    share = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    falling = 1.0 - share if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return schedule.final_ratio + (1.0 - schedule.final_ratio) * falling


def make_muon(model: Any, settings: Optimizer, lr: float, on_gpu: bool) -> torch.optim.Optimizer:
    """Return Muon for the hidden matrices of a model and AdamW for the rest, compiled if ``on_gpu``.

    DeepSpeed's Muon (https://kellerjordan.github.io/posts/muon/) works at every ZeRO stage: at stages 1 to 3 DeepSpeed
    orthogonalizes whole gradients before partitioning them. ``torch.optim.Muon`` would receive flat partitions.
    """
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    if not on_gpu:
        torch.compiler.set_stance("force_eager")  # DeepSpeed's functions are decorated with torch.compile
    hidden, matrices, rest = split(model)
    for parameter in hidden:
        parameter.use_muon = True  # read by DeepSpeed's ZeRO optimizers
    adam = {"use_muon": False, "lr": lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay, **adam},
        {"params": rest, "weight_decay": 0.0, **adam},
        {
            "params": hidden,
            "use_muon": True,
            "lr": settings.muon_lr,
            "momentum": settings.muon_momentum,
            "weight_decay": settings.weight_decay,
            "ns_method": "standard",
        },
    ]
    return MuonWithAuxAdam(
        [group for group in groups if group["params"]],
        adam_optimizer=torch.optim.AdamW,
        adam_optimizer_kwargs={"fused": on_gpu, "foreach": False if not on_gpu else None},
    )


def split(model: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the trainable parameters: hidden matrices, other matrices, and those that are no matrix."""
    ends = {id(layer.weight) for layer in model.modules() if isinstance(layer, torch.nn.Embedding)}
    output = model.get_output_embeddings()
    if output is not None:
        ends.add(id(output.weight))
    hidden: list[Any] = []
    matrices: list[Any] = []
    rest: list[Any] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            # Under ZeRO-3 a parameter's own shape is empty; ds_shape is the full one.
            dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
            is_hidden = dimensions == 2 and id(parameter) not in ends
            (hidden if is_hidden else matrices if dimensions >= 2 else rest).append(parameter)
    return hidden, matrices, rest


_PATIENCE_S = 4.0  # seconds without output after which a note is printed


def make(model: Any, config: Config, world: World) -> torch.optim.Optimizer:
    """Make the optimizer of a model's trainable parameters; ``ConfigError`` if DeepSpeed's own cannot be built."""
    settings = config.optimizer
    lr = learning_rate(config)
    common: dict[str, Any] = {"lr": lr, "betas": (settings.beta1, settings.beta2), "eps": settings.eps}
    groups = _groups(model, settings.weight_decay)
    offload = config.zero.offload_optimizer
    kind = settings.kind
    if kind == "muon":
        return make_muon(model, settings, lr, world.on_gpu)
    if kind in SMALL_STATES:
        states = "8bit" if kind == "adamw_8bit" else "bf16"
        # All or none: results with and without compilation differ in their last bits.
        compiled = world.on_gpu and world.all_agree(not world.has_values or compiles(world.device, states))
        if world.on_gpu and not compiled:
            world.note(f"torch.compile does not work here: {kind} updates in many small kernels, which is slower")
        return SmallStateAdamW(
            groups,
            states=states,
            compiled=compiled,
            # At stage 0 all ranks update the same weights and must round them equally.
            seed=salt(config.training.seed, world.rank if zero_stage(config, world.size) else 0),
            **common,
        )
    if kind == "deepspeed" or (kind == "auto" and offload):
        note = threading.Timer(
            _PATIENCE_S, world.note, ["compiling DeepSpeed's Adam, once: a minute or more on few cores"]
        )
        note.start()
        try:
            with activity("compilation", "DeepSpeed's Adam, at its first use"):
                made, problem = _deepspeed_adam(groups, common, offload), ""
        except Exception as error:  # errors of the compiler, ninja or the loader: all mean that it is not available
            made, problem = None, (str(error).strip() or repr(error)).splitlines()[-1]
        finally:
            note.cancel()
        if world.all_agree(made is not None) and made is not None:
            return made
        if kind == "deepspeed":
            raise ConfigError(
                f"optimizer.kind is deepspeed, but its Adam cannot be built here ({problem or 'on another rank'}); "
                "see 'ftmon doctor', or use optimizer.kind=torch_fused"
            )
        world.note(f"DeepSpeed's CPU Adam cannot be built here ({problem}); stepping with PyTorch's fused Adam instead")
        kind = "torch_fused"
    if kind == "auto":
        kind = "torch_fused" if world.on_gpu else "torch"
    return torch.optim.AdamW(groups, foreach=kind == "torch_foreach", fused=kind == "torch_fused", **common)


def scheduler(config: Config, total_steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the factory of an optimizer's learning-rate scheduler, as DeepSpeed calls it."""
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: factor(config.schedule, step, total_steps)
    )


@contextmanager
def own_settings(engine: Any) -> Generator[None]:
    """Keep this run's weight decay, betas, eps, kernels and clipping within a ``with`` block that loads a checkpoint.

    A checkpoint's groups have the settings of the run that wrote it. After a conversion to another number of ranks
    DeepSpeed gives them to the wrong groups too: those of ZeRO-3 all get the first one's.
    """
    counts = ("params", "step")  # DeepSpeed's FusedAdam counts steps in its groups
    kept = [
        {name: value for name, value in group.items() if name not in counts}
        for group in engine.basic_optimizer.param_groups
    ]
    clipping = getattr(engine.optimizer, "clip_grad", None)
    yield
    for group, settings in zip(engine.basic_optimizer.param_groups, kept, strict=True):
        group.update(settings)
    if clipping is not None:
        engine.optimizer.clip_grad = clipping
    own_step_counts(engine.basic_optimizer)


def own_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Give each state a step count of its own, on the device of the weights if the optimizer is fused.

    DeepSpeed sets the file's count, in host memory, without ``Optimizer.load_state_dict`` (``base_optimizer.py`` and
    ``stage3.py``, universal format); ZeRO-3 sets one tensor for all subgroups, and each would advance it. Under ZeRO-3
    a group holds its parameters only during a step, so all states are taken.
    """
    beside = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        if isinstance(step := state.get("step"), torch.Tensor):
            state["step"] = step.to(parameter.device if beside else step.device, copy=True)


def apply_schedule(engine: Any, config: Config, step: int, total_steps: int) -> None:
    """Set the learning rate of the next step after a resume, by the present configuration."""
    groups: list[dict[str, Any]] = engine.basic_optimizer.param_groups
    peaks = [config.optimizer.muon_lr if group.get("use_muon") else learning_rate(config) for group in groups]
    engine.lr_scheduler.base_lrs = peaks
    for group, peak in zip(groups, peaks, strict=True):
        group["initial_lr"] = peak
        group["lr"] = peak * factor(config.schedule, step, total_steps)


def change_total(engine: Any, config: Config, total_steps: int) -> None:
    """Let a training that has not begun have another number of steps."""
    made = scheduler(config, total_steps)(engine.basic_optimizer)
    engine.lr_scheduler.lr_lambdas = made.lr_lambdas
    apply_schedule(engine, config, 0, total_steps)


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Split the parameters into matrices, which decay, and the rest, which does not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Under ZeRO-3 a parameter's own shape is empty; ds_shape is the full one.
    matrices = [parameter for parameter in trained if len(getattr(parameter, "ds_shape", parameter.shape)) >= 2]
    chosen = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in trained if id(parameter) not in chosen]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _deepspeed_adam(groups: list[dict[str, Any]], common: dict[str, Any], offload: bool) -> torch.optim.Optimizer:
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **common)
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(groups, adam_w_mode=True, **common)
