"""Checks across the configuration, the files it names and this machine, made before anything is started."""

import os
from importlib import util
from pathlib import Path
from typing import Any

import msgspec

from ....protocol.errors import UsageError
from .. import hardware
from ..data import formats
from ..data.first import first_record
from ..data.shipped import NONE, shipped
from ..engine import ds_keys
from ..faults import spec
from ..model.config import Lora
from ..optim import support
from . import sequence_parallel
from .load import Loaded
from .schema import Config

_GPU_THREADS = 4
_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


class Resolved(msgspec.Struct, frozen=True):
    """A checked configuration with nothing left to choose, and the devices it runs on."""

    config: Config
    device: str
    """``cuda`` or ``cpu``."""
    gpus: list[str]
    """The GPUs of the ranks, as CUDA_VISIBLE_DEVICES names them; empty on the CPU."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.config.run.ranks


def resolve(loaded: Loaded, elsewhere: int = 0) -> Resolved:
    """Check a configuration against itself, its files and this machine, and settle what was left to choose.

    Args:
        loaded: the configuration.
        elsewhere: check it for so many ranks of another machine, and leave this one's GPUs, compiler, ports and output
            folder alone; 0: for this machine.

    Raises:
        ConfigError: something does not hold; the text names the place and the dotted path.
    """
    config = loaded.config
    _check_model(loaded)
    _check_data(loaded)
    if elsewhere:
        device, gpus = "cpu" if config.run.device == "cpu" else "cuda", list[str]()
    else:
        device, gpus = _devices(loaded)
    ranks = config.run.ranks or elsewhere or len(gpus) or 1
    gpus = gpus[:ranks]
    _check_batch(loaded, ranks)
    _check_settings(loaded, device)
    ds_keys.check(config.deepspeed, loaded.error)
    precision = _precision(config, device)
    _check_dtypes(loaded, precision)
    for refused in (support.refusal(config, precision), sequence_parallel.refusal(config, ranks, precision)):
        if refused is not None:
            raise loaded.error(*refused)
    _check_evaluation(loaded)
    if not elsewhere:
        _check_compiler(loaded, device)
        _check_output(loaded)
    _check_fault(loaded, ranks)
    _check_lengths(loaded, precision)
    threads = config.run.threads or _threads(config, device, ranks)
    run = msgspec.structs.replace(config.run, device=device, ranks=ranks, threads=threads)
    settled = msgspec.structs.replace(
        _settle_paths(config),
        run=run,
        training=msgspec.structs.replace(config.training, precision=precision),
        evaluation=msgspec.structs.replace(config.evaluation, path=_absolute(config.evaluation.path)),
        output=msgspec.structs.replace(config.output, dir=_absolute(config.output.dir)),
        checkpoint=msgspec.structs.replace(config.checkpoint, resume=_resume_path(config.checkpoint.resume)),
    )
    return Resolved(settled, device, gpus)


def settle_data(loaded: Loaded) -> Config:
    """Check and settle a configuration, independent of this machine's hardware.

    Where ``run.ranks`` is not given, ranks are as many as ``training.total_batch`` and sequence parallelism ask for.

    Raises:
        ConfigError: something does not hold on any machine.
    """
    config = loaded.config
    training, ranks = config.training, 1
    if config.run.device != "cpu":
        rows = training.micro_batch * training.grad_accumulation
        ranks = training.sequence_parallel_size * max(1, training.total_batch // rows)
    return resolve(loaded, elsewhere=ranks).config


def _settle_paths(config: Config) -> Config:
    data = msgspec.structs.replace(
        config.data,
        path=_absolute(config.data.path),
        files=[msgspec.structs.replace(file, path=_absolute(file.path)) for file in config.data.files],
        chat_template=_template_path(config.data.chat_template),
    )
    return msgspec.structs.replace(
        config,
        data=data,
        model=msgspec.structs.replace(config.model, name=_absolute_if_folder(config.model.name)),
        tokenizer=msgspec.structs.replace(config.tokenizer, name=_absolute_if_folder(config.tokenizer.name)),
    )


def _threads(config: Config, device: str, ranks: int) -> int:
    """Return a rank's host threads: its share of the cores where the host computes, else few."""
    share = max(1, hardware.cores() // ranks)
    computes = device == "cpu" or config.zero.offload_optimizer
    return share if computes else min(share, _GPU_THREADS)


def _check_model(loaded: Loaded) -> None:
    model = loaded.config.model
    if not model.name and not model.config:
        raise loaded.error("model", "needs a name (a hub name or a local folder) or a config (random weights)")
    if model.name and model.config:
        raise loaded.error("model", "has both a name and a config; leave one out")
    if model.config and not isinstance(model.config.get("model_type"), str):
        raise loaded.error("model.config", "needs a model_type, such as llama or qwen2")
    for path, name, marker in (
        ("model.name", model.name, "config.json"),
        ("tokenizer.name", loaded.config.tokenizer.name, "tokenizer_config.json"),
    ):
        if not _is_path(name):
            continue
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise loaded.error(path, f"{name}: no such folder")
        if not (folder / marker).exists():
            raise loaded.error(path, f"{name}: is not a folder that save_pretrained wrote (no {marker})")


def _check_data(loaded: Loaded) -> None:
    data = loaded.config.data
    given = [key for key in ("path", "files", "name") if getattr(data, key)]
    if not given:
        raise loaded.error("data", "needs a path (a local file), files (several) or a name (of a data set on the hub)")
    if len(given) > 1:
        raise loaded.error(
            "data", f"has both a {given[0]} and {'' if given[1] == 'files' else 'a '}{given[1]}; leave one out"
        )
    # A folder may be a data set as the hub has them: files of several splits, named in a card.
    if data.name and _is_path(data.name) and not Path(data.name).is_dir():
        raise loaded.error("data.name", f"{data.name} looks like a file; give it as data.path")
    if data.train_on_prompt and data.train_on != "assistant":
        raise loaded.error("data.train_on_prompt", f"and data.train_on={data.train_on} differ; leave the former out")
    template = Path(data.chat_template).expanduser()
    if data.chat_template and data.chat_template not in (NONE, *shipped()) and not template.is_file():
        raise loaded.error(
            "data.chat_template", f"{data.chat_template}: no such file; give {', '.join(shipped())}, none or a path"
        )
    if data.path:
        _check_file(loaded, "data.path", data.path)
    for number, file in enumerate(data.files):
        _check_file(loaded, f"data.files[{number}].path", file.path)


def _check_file(loaded: Loaded, key: str, name: str) -> None:
    path = Path(name).expanduser()
    if not path.is_file():
        raise loaded.error(key, f"{name}: " + ("is a directory" if path.is_dir() else "no such file"))
    if path.suffix not in _DATA_SUFFIXES:
        raise loaded.error(key, f"{name}: must end in {', '.join(_DATA_SUFFIXES[:-1])} or .parquet")
    if path.stat().st_size == 0:
        raise loaded.error(key, f"{name}: is empty")
    if path.suffix == ".parquet":
        return
    try:
        record = first_record(path, loaded.config.data.text_column)
    except OSError as error:
        raise loaded.error(key, f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise loaded.error(key, f"{name}: {error}") from None
    check_columns(loaded, record)


def check_columns(loaded: Loaded, record: dict[str, Any]) -> None:
    """Refuse data whose first record does not hold what ``data.format`` needs.

    Raises:
        ConfigError: a column is not there.
    """
    try:
        formats.detect(record, loaded.config.data)
    except UsageError as error:
        path, _, text = str(error).partition(" ")
        raise loaded.error(path, text) from None


def _devices(loaded: Loaded) -> tuple[str, list[str]]:
    run = loaded.config.run
    gpus = [] if run.device == "cpu" else hardware.usable_gpus()
    if run.device == "cuda" and not gpus:
        why = "PyTorch here is built for the CPU alone" if hardware.torch_is_cpu_only() else "no GPU is visible"
        raise loaded.error("run.device", f"is cuda, but {why}; see 'ftmon doctor', or use run.device=cpu")
    if gpus and run.ranks > len(gpus):
        raise loaded.error(
            "run.ranks", f"is {run.ranks}, but {len(gpus)} GPU{'s are' * (len(gpus) != 1) or ' is'} visible"
        )
    if not gpus and run.ranks > hardware.cores() * 4:
        raise loaded.error("run.ranks", f"is {run.ranks}, too many for {hardware.cores()} CPU cores")
    if run.master_port and not hardware.port_is_free(run.master_port):
        raise loaded.error("run.master_port", f"{run.master_port} is taken; leave it out for a free one")
    return ("cuda" if gpus else "cpu"), gpus


def _check_batch(loaded: Loaded, ranks: int) -> None:
    training = loaded.config.training
    sharing = training.sequence_parallel_size
    total = training.micro_batch * training.grad_accumulation * ranks // sharing
    if training.total_batch not in (0, total) and ranks % sharing == 0:
        raise loaded.error(
            "training.total_batch",
            f"is {training.total_batch}, but micro_batch {training.micro_batch} x grad_accumulation "
            f"{training.grad_accumulation} x {ranks} rank{'s' * (ranks != 1)}"
            f"{f' / sequence_parallel_size {sharing}' * (sharing > 1)} is {total}",
        )


def _check_settings(loaded: Loaded, device: str) -> None:
    config = loaded.config
    if config.zero.offload_optimizer and config.zero.stage == 0:
        raise loaded.error("zero.offload_optimizer", "needs zero.stage 1, 2 or 3")
    if config.zero.offload_parameters and config.zero.stage != 3:
        raise loaded.error("zero.offload_parameters", "needs zero.stage 3")
    if config.optimizer.kind == "torch_fused" and device == "cpu" and config.training.precision == "fp16":
        raise loaded.error("optimizer.kind", "torch_fused does not do fp16 on the CPU; use torch")
    if device == "cpu" and config.model.attention == "flash_attention_2":
        raise loaded.error("model.attention", "flash_attention_2 needs a GPU")
    _check_lora(loaded)
    if config.lora.rank and config.lora.kind == "dora" and config.zero.stage == 3:
        # peft 0.21 computes the norms of weights that ZeRO-3 has partitioned (tuners/lora/dora.py, get_weight_norm).
        raise loaded.error("lora.kind", "dora cannot be used with zero.stage=3; use zero.stage=2, or lora.kind=lora")
    _check_quantization(loaded)
    _check_activations(loaded)
    _check_compile(loaded, device)
    if device == "cpu" and config.training.precision == "fp16":
        raise loaded.error("training.precision", "fp16 is not for the CPU; use fp32 or bf16")
    if config.training.max_steps and config.schedule.warmup_steps > config.training.max_steps:
        raise loaded.error(
            "schedule.warmup_steps",
            f"is {config.schedule.warmup_steps}, more than training.max_steps, which is {config.training.max_steps}",
        )


def _check_lora(loaded: Loaded) -> None:
    """Refuse settings of adapters without adapters: all weights would be trained."""
    lora = loaded.config.lora
    for name, default in msgspec.structs.asdict(Lora()).items():
        if not lora.rank and getattr(lora, name) != default:
            raise loaded.error(f"lora.{name}", "needs lora.rank above 0: without it all weights are trained")


def _check_quantization(loaded: Loaded) -> None:
    config = loaded.config
    if config.model.quantization == "none":
        return
    if not config.lora.rank:
        raise loaded.error("model.quantization", "needs lora.rank above 0: weights held in 4 bits cannot be trained")
    if not config.model.name:
        raise loaded.error("model.quantization", "needs a model.name: random weights are not quantized")
    if config.zero.stage == 3:
        raise loaded.error("model.quantization", "cannot be used with zero.stage=3, which partitions the base; use 2")
    if util.find_spec("bitsandbytes") is None:
        raise loaded.error("model.quantization", "needs bitsandbytes; run: pip install 'ftmon[qlora]'")


def _check_activations(loaded: Loaded) -> None:
    model = loaded.config.model
    if model.gradient_checkpointing == "none":
        if model.checkpoint_every > 1:
            raise loaded.error("model.checkpoint_every", "needs model.gradient_checkpointing: layers or selective")
        if model.activation_offload == "inputs":
            raise loaded.error(
                "model.activation_offload", "is inputs, those of recomputed layers; set model.gradient_checkpointing"
            )


def _check_compile(loaded: Loaded, device: str) -> None:
    config = loaded.config
    budget = "model.activation_memory_budget"
    if config.model.compile == "off":
        if config.model.activation_memory_budget < 1:
            raise loaded.error(budget, "needs model.compile=layers; without it use model.gradient_checkpointing")
        return
    if config.model.activation_memory_budget < 1 and config.model.gradient_checkpointing != "none":
        raise loaded.error(
            budget, "cannot be used with model.gradient_checkpointing, which keeps less; use one of them"
        )

    def refuse(text: str) -> Exception:
        return loaded.error("model.compile", text)

    if not config.data.packing:
        raise refuse("needs data.packing=true: padded batches differ in length, and each would be compiled anew")
    if config.model.quantization != "none":
        raise refuse("cannot be used with model.quantization")
    if config.model.gradient_checkpointing == "selective":
        raise refuse("cannot be used with gradient_checkpointing=selective; use model.activation_memory_budget")
    if device == "cpu" and config.optimizer.kind == "muon":
        raise refuse("cannot be used with optimizer.kind=muon on the CPU, where nothing is compiled then; use off")


def _check_compiler(loaded: Loaded, device: str) -> None:
    if loaded.config.model.compile != "off" and hardware.compiler(device) is None:
        name = "C++ compiler (g++, clang++ or $CXX)" if device == "cpu" else "C compiler (gcc, clang or $CC)"
        raise loaded.error("model.compile", f"needs a {name}, not found here; install one, or use model.compile=off")


def _precision(config: Config, device: str) -> str:
    """Return the training precision with ``auto`` resolved."""
    if config.training.precision == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return config.training.precision


def _check_dtypes(loaded: Loaded, precision: str) -> None:
    zero = loaded.config.zero
    for name, value in (("grad_accum_dtype", zero.grad_accum_dtype), ("communication_dtype", zero.communication_dtype)):
        if value not in ("auto", "fp32", precision):
            raise loaded.error(f"zero.{name}", f"is {value}, but training.precision is {precision}; use fp32")
    if zero.stage == 0 and zero.grad_accum_dtype not in ("auto", precision):
        raise loaded.error(
            "zero.grad_accum_dtype",
            f"is {zero.grad_accum_dtype}, but DeepSpeed accumulates in {precision} at zero.stage 0; use zero.stage=1",
        )


def _check_evaluation(loaded: Loaded) -> None:
    settings, data = loaded.config.evaluation, loaded.config.data
    sources = [name for name in ("path", "split", "share") if getattr(settings, name)]
    if len(sources) > 1:
        raise loaded.error(f"evaluation.{sources[1]}", f"is given beside evaluation.{sources[0]}; leave one out")
    if not sources:
        for name in ("every", "patience", "samples"):
            if getattr(settings, name):
                raise loaded.error(f"evaluation.{name}", "needs data: evaluation.path, evaluation.split or .share")
        return
    if settings.path:
        _check_file(loaded, "evaluation.path", settings.path)
    if settings.split and not data.name:
        raise loaded.error("evaluation.split", "needs data.name; with a local file use evaluation.path or .share")
    if settings.patience and not settings.every:
        raise loaded.error("evaluation.patience", "needs evaluation.every above 0")
    if not settings.every and not settings.at_end:
        raise loaded.error("evaluation.every", "is 0 and evaluation.at_end is false: nothing would be evaluated")


def _check_output(loaded: Loaded) -> None:
    config = loaded.config
    resume = config.checkpoint.resume
    if resume not in ("never", "auto") and not Path(resume).expanduser().is_dir():
        raise loaded.error("checkpoint.resume", f"{resume}: no such folder (or give never, or auto)")
    if not config.output.dir:
        if resume == "auto":
            raise loaded.error("checkpoint.resume", "is auto, but output.dir is not given: there is nowhere to look")
        return
    folder = Path(config.output.dir).expanduser()
    if folder.exists() and not folder.is_dir():
        raise loaded.error("output.dir", f"{config.output.dir}: is not a directory")
    existing = next((parent for parent in (folder, *folder.absolute().parents) if parent.exists()), Path("/"))
    if not os.access(existing, os.W_OK):
        raise loaded.error("output.dir", f"{config.output.dir}: cannot be written ({existing} is not yours)")
    used = any((folder / name).exists() for name in ("checkpoints", "model"))
    if used and resume == "never" and not config.output.overwrite:
        raise loaded.error(
            "output.dir",
            f"{config.output.dir}: holds results of an earlier run; go on from them with checkpoint.resume=auto, "
            "begin anew with output.overwrite=true, or give another folder",
        )


def _check_fault(loaded: Loaded, ranks: int) -> None:
    if not loaded.config.debug.fault:
        return
    try:
        fault = spec.parse(loaded.config.debug.fault, ranks)
    except UsageError as error:
        raise loaded.error("debug.fault", str(error)) from None
    steps = loaded.config.training.max_steps
    if steps and fault.step > steps:
        raise loaded.error("debug.fault", f"comes at step {fault.step}, but training ends at step {steps}")


def _check_lengths(loaded: Loaded, precision: str) -> None:
    config = loaded.config
    lengths = config.debug.lengths
    if not lengths:
        return
    for refused, text in (
        (max(lengths) > config.training.sequence_length, "go up to training.sequence_length"),
        (not config.training.max_steps, "need training.max_steps, the steps at each length"),
        (config.model.compile != "off", "go with model.compile=off: layers would be compiled for each length"),
        (precision == "fp16", "go with bf16 or fp32: a step that overflows in fp16 is not counted"),
        (config.training.sequence_parallel_size > 1, "go with training.sequence_parallel_size=1"),
    ):
        if refused:
            raise loaded.error("debug.lengths", text)


def _is_path(name: str) -> bool:
    """Return whether this is a local path, and not a hub name such as ``Qwen/Qwen2.5-0.5B``."""
    if not name:
        return False
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir() or name.count("/") > 1


def _template_path(name: str) -> str:
    return name if name in ("", NONE, *shipped()) else _absolute(name)


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute()) if path else ""


def _absolute_if_folder(name: str) -> str:
    return _absolute(name) if _is_path(name) else name


def _resume_path(resume: str) -> str:
    return resume if resume in ("never", "auto") else _absolute(resume)
