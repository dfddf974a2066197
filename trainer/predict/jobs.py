"""Jobs to predict: a configuration of ftmon's own trainer, or a plain loop described by flags."""

import argparse
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.errors import ConfigError
from ...protocol.host.machine import FIT_TABLE, GPUS, Gpu, find_gpu
from ..recipe.model.shape import beyond, named_config
from ..recipe.preflight.consistency import settle_compile
from ..recipe.support import in_bf16_optimizer, settle_batch, zero_stage
from . import deepspeed_file
from .ranks import COMPILER, differing, import_transformers

if TYPE_CHECKING:
    from ..recipe.config.schema import Config
    from .dry import DryRun, Job
    from .recipe import Documents


MOST_RANKS = 4096  # DeepSpeed's set-up iterates over all ranks in Python: with 100,000 it takes minutes
_LENGTHS = [1024]


class Prepared(NamedTuple):
    """A job with ranks ready to run."""

    make: "Callable[[int], DryRun]"  # Makes one rank's dry run in its process
    model: str
    ranks: int
    stage: int
    micro_batch: int
    accumulation: int
    lengths: list[int]
    offload: bool  # Whether optimizer states are offloaded
    gpu: Gpu
    notes: list[str]  # Assumptions
    steps: int = 0  # Optimizer steps of the run; 0: not known without its data
    config: "Config | None" = None  # Configuration of ftmon's own trainer; None: a plain loop
    sequence_parallel_size: int = 1  # Ranks that share each sequence
    documents: "Documents | None" = None  # Of the data set's packed rows; None: no packing, or data that are not read
    make_shallow: "Callable[[int, int], DryRun] | None" = None
    """Makes a rank's dry run with so many of the layers, which are alike; None: they are few, or differ."""
    alike: bool = False  # Whether ranks are alike at any stage

    @property
    def different(self) -> list[int]:
        """Ranks to run, which may differ; the others have the figures of the nearest one."""
        return [0] if self.alike else differing(self.stage, self.ranks)

    @property
    def data_ranks(self) -> int:
        """Number of groups of ranks with rows of their own."""
        return self.ranks // self.sequence_parallel_size


def prepare(arguments: argparse.Namespace, allocator: Settings) -> Prepared:
    """Return the job of the command's arguments; ``ConfigError``: the model or configuration cannot be used."""
    _check_ranks(arguments.ranks or 1, "--ranks")
    kind = _script if getattr(arguments, "command", None) else _configured if arguments.config else _flags
    return kind(arguments, allocator, find(arguments.gpu))


def modules(config: "Config | None") -> list[str]:
    """Return what the dry runs of a configuration would otherwise import each: half of the time of a short one."""
    if config is None:
        return []
    kind = str(config.model.config.get("model_type", "")) or named_config(config.model).model_type
    names = ["torch.nn.attention.varlen", f"{__package__}.recipe", f"transformers.models.{kind}.modeling_{kind}"]
    if config.lora.rank:
        names.append("peft")
    return names


def compiler(config: "Config | None") -> list[str]:
    """Return what dry runs of a configuration import besides if they compile layers."""
    if config is None or settle_compile(config, True, lambda text: None).model.compile == "off":
        return []
    return [f"{__package__}.compiled", COMPILER, "torch._inductor.decomposition"]


def _check_ranks(count: int, where: str) -> None:
    if count > MOST_RANKS:
        raise ConfigError(f"{where}: predictions support up to {MOST_RANKS:,} ranks, not {count:,}")


def find(name: str, where: str = "--gpu") -> Gpu:
    """Return the kind of GPU of this name, as a user or PyTorch gives it.

    ``where``: the option that has it, for the error. Raises ``ConfigError`` if the table has no such GPU, or several.
    """
    found, plain = find_gpu(name), _plain(name)
    titled = [gpu for gpu in FIT_TABLE if _plain(gpu.title).startswith(plain)]
    titled = titled or [gpu for gpu in GPUS if len(plain) > 2 and plain in _plain(gpu.name)]
    if found is not None or len(titled) == 1:
        return found or titled[0]
    if titled:
        raise ConfigError(f"{where}: {name} can be {' or '.join(gpu.name for gpu in titled)}; say which")
    titles = {_plain(gpu.title): gpu.title for gpu in FIT_TABLE}
    if near := get_close_matches(plain, titles, 1):
        raise ConfigError(f"{where}: {name} is not in the table of GPUs; did you mean {titles[near[0]]}?")
    known = ", ".join(titles.values())
    raise ConfigError(f"{where}: {name} is not in the table of GPUs; known are PyTorch's names and {known}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _configured(arguments: argparse.Namespace, allocator: Settings, gpu: Gpu) -> Prepared:
    import_transformers()
    from . import recipe

    documents: Documents | None = getattr(arguments, "documents", None)
    label_share: float = getattr(arguments, "label_share", 1.0)
    given = arguments.sequence_length or []
    config = recipe.read(arguments.config, arguments.overrides, arguments.ranks, given, data=arguments.data)
    settled = settle_batch(config, getattr(arguments, "rows", 0))
    _check_ranks(config.run.ranks, f"{arguments.config}: run.ranks")
    shallow = partial(recipe.make_shallow, settled, allocator, gpu, documents, label_share=label_share)
    return Prepared(
        lambda rank: recipe.RecipeRun(settled, allocator, gpu, documents, rank, label_share),
        config.model.name or str(config.model.config["model_type"]),
        config.run.ranks,
        zero_stage(config, config.run.ranks),
        config.training.micro_batch,
        settled.training.micro_steps,
        given or [config.training.sequence_length],
        config.zero.offload_optimizer,
        gpu,
        [],
        config.training.max_steps,
        config,
        config.training.sequence_parallel_size,
        documents,
        shallow if recipe.repeats(config) else None,
        in_bf16_optimizer(config, config.run.ranks),
    )


def _flags(arguments: argparse.Namespace, allocator: Settings, gpu: Gpu) -> Prepared:
    from . import result
    from .dry import DryRun, Job

    settings, notes = deepspeed(arguments)
    ranks = arguments.ranks or 1
    micro, accumulation = _batch(settings, ranks, arguments, f"{arguments.deepspeed}")
    shape = result.read_config(arguments.model)
    if note := beyond(shape, max(arguments.sequence_length or _LENGTHS)):
        notes.append(note)
    checkpointing, lora_rank = arguments.checkpointing, arguments.lora_rank
    job = Job(shape, settings, ranks, micro, accumulation, checkpointing, lora_rank, allocator=allocator, gpu=gpu)
    return _plain_loop(job, lambda rank: DryRun(job, rank), arguments, arguments.model, notes)


def _plain_loop(
    job: "Job", make: "Callable[[int], DryRun]", arguments: argparse.Namespace, model: str, notes: list[str]
) -> Prepared:
    stage, offload = deepspeed_file.stage(job.deepspeed), deepspeed_file.offloads(job.deepspeed)
    lengths: list[int] = arguments.sequence_length or _LENGTHS
    return Prepared(make, model, job.ranks, stage, job.micro_batch, job.accumulation, lengths, offload, job.gpu, notes)


def _script(arguments: argparse.Namespace, allocator: Settings, gpu: Gpu) -> Prepared:
    from . import commands, ranks
    from .dry import Job
    from .script import ScriptInputs, ScriptRun

    started = commands.parse(arguments.command)
    count = arguments.ranks or started.ranks or 1
    _check_ranks(count, arguments.command[0])
    script_inputs: ScriptInputs | None = getattr(arguments, "script_inputs", None)
    if script_inputs is None:
        ranks.warm()
        script_inputs = ranks.once(lambda: ScriptRun(started, None, count, allocator, gpu).inputs, ScriptInputs)
        arguments.script_inputs = script_inputs
    settings = deepspeed_file.with_changes(script_inputs.deepspeed, getattr(arguments, "changes", {}))
    micro, accumulation = _batch(settings, count, arguments, f"{started.script}: its DeepSpeed configuration")
    checkpointing = arguments.checkpointing or script_inputs.checkpointing
    job = Job(None, settings, count, micro, accumulation, checkpointing, allocator=allocator, gpu=gpu)
    notes = [f"{started.script}: its DeepSpeed configuration: {text}" for text in deepspeed_file.unknown(settings)]
    if not (arguments.ranks or started.ranks):
        notes.append("the command does not say how many ranks it starts: 1 assumed (--ranks)")
    if not arguments.sequence_length:
        notes.append("rows of 1,024 tokens assumed (--sequence-length)")
    make = partial(ScriptRun, started, job, count, allocator, gpu)
    return _plain_loop(job, make, arguments, script_inputs.model, notes)


def _batch(settings: dict[str, Any], ranks: int, arguments: argparse.Namespace, where: str) -> deepspeed_file.Batch:
    try:
        return deepspeed_file.batch(settings, ranks, arguments.micro_batch, arguments.accumulation)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def deepspeed(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Return the run's DeepSpeed configuration, and the assumptions."""
    notes: list[str] = []
    settings: dict[str, Any] = {}
    if arguments.deepspeed:
        settings = deepspeed_file.read(arguments.deepspeed, notes)
    else:
        settings["bf16"] = {"enabled": True}
        notes.append("no DeepSpeed configuration given: bf16, ZeRO stage 0")
    settings = deepspeed_file.with_changes(settings, getattr(arguments, "changes", {}))
    if arguments.optimizer:
        settings["optimizer"] = deepspeed_file.OPTIMIZERS[arguments.optimizer]
    elif "optimizer" not in settings:
        settings["optimizer"] = deepspeed_file.OPTIMIZERS["deepspeed"]
        notes.append("the configuration names no optimizer: DeepSpeed's AdamW")
    return settings, notes
