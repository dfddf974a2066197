"""A dry run of another script, up to ``deepspeed.initialize``, whose engine is then predicted.

The script runs under fake tensors from its first line, so that a model uses no memory; ``from_pretrained`` makes the
model from its configuration, without weights. Everything else before ``deepspeed.initialize`` is real: the script reads
its data and writes its files.
"""

import contextlib
import inspect
import io
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.errors import ConfigError
from ...protocol.host.machine import Gpu
from . import deepspeed_file, fake
from .commands import Launched
from .dry import DryRun, Job

_NOT_PREDICTED = "{} is not predicted, only deepspeed.initialize is: --deepspeed with ZeRO stage {} is nearest to it"
_REFUSED = {
    "torch.nn.parallel.DistributedDataParallel.__init__": _NOT_PREDICTED.format("DistributedDataParallel", 0),
    "torch.distributed.fsdp.FullyShardedDataParallel.__init__": _NOT_PREDICTED.format("FullyShardedDataParallel", 3),
    "torch.distributed.fsdp.fully_shard": _NOT_PREDICTED.format("fully_shard", 3),
    "torch.autograd.backward": "it trains without deepspeed.initialize; only training with it can be predicted",
}


@contextlib.contextmanager
def refused(error: type[BaseException]) -> Generator[None]:
    """Raise ``error`` in the body if a model is wrapped by DDP or FSDP, or gradients are computed.

    ``torch.distributed.init_process_group`` does nothing there, as the dry run has joined its process group already.
    """

    def stop(text: str) -> Any:
        def stopped(*_: Any, **__: Any) -> Any:
            raise error(text)

        return stopped

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch("torch.distributed.init_process_group", lambda *_, **__: None))
        for target, text in _REFUSED.items():
            patches.enter_context(patch(target, stop(text)))
        yield


_FLAGS = "use --model and --deepspeed instead"
_MOST_SECONDS = 900  # Time limit within which a script must call ``deepspeed.initialize``
_MOST_CHARACTERS = 240
_ASSUMED = "the script was run up to deepspeed.initialize; steps are of a plain loop on input_ids and labels"
ADAMS = ("Adam", "AdamW", "FusedAdam")  # A script's optimizers that DeepSpeed's CPUAdam can replace with equal results


class ScriptInputs(msgspec.Struct, frozen=True):
    """Arguments of a script's call of ``deepspeed.initialize``."""

    model: str
    deepspeed: dict[str, Any]
    checkpointing: bool = False
    optimizer: str = ""  # Class of the script's own optimizer; empty: DeepSpeed's configuration names one
    trainer: bool = False  # Whether transformers' ``Trainer`` called it, whose arguments are batch and checkpointing


class _ReachedError(BaseException):
    """Raised when the script calls ``deepspeed.initialize``; passes its ``except Exception``."""


class _StopError(BaseException):
    """Raised at an operation that a dry run does not support; the text names it. Passes ``except Exception``."""


_QUANTIZED = (
    "quantized models of a script cannot be predicted: their kernels do not run on fake tensors; for QLoRA use "
    "CONFIG.yaml with model.quantization=nf4"
)


class ScriptRun(DryRun):
    """A dry run of a script's model under its DeepSpeed configuration; without a ``job`` it only reads the inputs."""

    def __init__(
        self, launched: Launched, job: Job | None, ranks: int, allocator: Settings, gpu: Gpu, rank: int = 0
    ) -> None:
        self._launched = launched
        self._only_inputs = job is None
        self._kept: BaseException | None = None  # Keeps the script's frames, and so its objects, alive
        self.inputs: ScriptInputs | None = None
        self.notes = [_ASSUMED]
        super().__init__(job or Job(None, {}, ranks, allocator=allocator, gpu=gpu), rank)

    def _make(self) -> None:
        import deepspeed

        module: Any = deepspeed
        original = module.initialize
        given: dict[str, Any] = {}
        signature = inspect.signature(original)

        def initialize(*arguments: Any, **named: Any) -> NoReturn:
            given.update(signature.bind(*arguments, **named).arguments)
            raise _ReachedError

        module.initialize = initialize
        _patch_weights()
        with refused(_StopError):
            self._run()
        module.initialize = original
        if not given:
            raise ConfigError(f"{self._launched.script}: ended without calling deepspeed.initialize; {_FLAGS}")
        self._make_engine(given, original)

    def _run(self) -> None:
        """Run the script until it calls ``deepspeed.initialize``, or ends.

        Raises ``ConfigError`` if it failed; the text names the place in the script, and what to use instead.
        """
        launched = self._launched
        sys.argv = [launched.script, *launched.arguments]
        sys.path.insert(0, os.getcwd() if launched.is_module else str(Path(launched.script).resolve().parent))
        os.environ["WANDB_MODE"] = "disabled"
        sys.stdin = io.StringIO()
        signal.signal(signal.SIGALRM, _late)
        signal.alarm(_MOST_SECONDS)
        try:
            _guard_values(launched)
            if launched.is_module:
                runpy.run_module(launched.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(launched.script, run_name="__main__")
        except _ReachedError as reached:
            self._kept = reached
        except SystemExit as error:
            if error.code not in (None, 0):
                text = f"{launched.script}: ended with {error.code!r} before deepspeed.initialize; {_FLAGS}"
                raise ConfigError(text) from None
        except (Exception, _StopError) as error:
            if os.environ.get("FTMON_DEBUG"):
                raise
            why = _why(error)
            flags = "" if why == _QUANTIZED else f"; {_FLAGS}"  # which refuse such a model too
            raise ConfigError(f"{_place(error, launched)}: {why}{flags}") from None
        finally:
            signal.alarm(0)
            _guard_values(None)

    def _make_engine(self, given: Mapping[str, Any], initialize: Any) -> None:
        """Make the engine from the script's arguments. Raises ``ConfigError`` if it cannot be predicted."""
        model = given.get("model")
        if model is None:
            raise ConfigError(f"{self._launched.script}: deepspeed.initialize without a model; {_FLAGS}")
        if given.get("mpu") is not None or type(model).__name__ == "PipelineModule":
            raise ConfigError(f"{self._launched.script}: pipeline and tensor parallelism are not predicted")
        _check_model(model, self._launched.script)
        optimizer = given.get("optimizer")
        made = type(optimizer).__name__ if optimizer is not None and not callable(optimizer) else ""
        settings = _settings(given, self._launched.script)
        name = str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)
        checkpointing = bool(getattr(model, "is_gradient_checkpointing", False))
        self.inputs = ScriptInputs(name, settings, checkpointing, made, _calls_trainer(self._kept))
        if self._only_inputs:
            return
        job = self.job
        settings = self._batched_settings()
        if job.checkpointing and not self.inputs.checkpointing:
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise ConfigError(f"{type(model).__name__} has no gradient_checkpointing_enable()")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model.config.use_cache = False
        trained = self._count_parameters(model)
        kept = {key: given[key] for key in ("optimizer", "model_parameters", "lr_scheduler") if given.get(key)}
        if "optimizer" not in kept and "model_parameters" not in kept:
            kept["model_parameters"] = trained
        if made in ADAMS and deepspeed_file.offloads(settings) and not deepspeed_file.offloads(self.inputs.deepspeed):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            # As Accelerate does with offloaded states.
            kept = {"optimizer": DeepSpeedCPUAdam(kept["optimizer"].param_groups, adamw_mode=made != "Adam")}
        self.engine, *_ = initialize(model=model, config=settings, **kept)


def _calls_trainer(reached: BaseException | None) -> bool:
    """Return whether transformers' ``Trainer`` is among the callers of ``deepspeed.initialize``."""
    frames = traceback.walk_tb(reached.__traceback__ if reached is not None else None)
    return any(frame.f_globals.get("__name__") == "transformers.trainer" for frame, _ in frames)


def _settings(given: Mapping[str, Any], script: str) -> dict[str, Any]:
    """Return DeepSpeed's configuration from the script's arguments."""
    found = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(found, (str, os.PathLike)):
        return deepspeed_file.read(os.fspath(found))
    if not isinstance(found, Mapping):
        raise ConfigError(f"{script}: deepspeed.initialize without a configuration; {_FLAGS}")
    settings = deepspeed_file.without_auto(msgspec.json.decode(msgspec.json.encode(dict(found), enc_hook=str)))
    try:
        deepspeed_file.check(settings)
    except ValueError as error:
        raise ConfigError(f"{script}: its DeepSpeed configuration: {error}") from None
    return settings


def _check_model(model: Any, script: str) -> None:
    """Refuse a model that does not train on ``input_ids`` and ``labels``."""
    named = inspect.signature(model.forward).parameters
    takes = {"input_ids", "labels"} <= set(named) or any(one.kind is one.VAR_KEYWORD for one in named.values())
    if not takes or getattr(model, "config", None) is None:
        raise ConfigError(
            f"{script}: {type(model).__name__} is no transformers model that takes input_ids and labels, so its steps "
            f"are not known; {_FLAGS}"
        )


def _patch_weights() -> None:
    """Make ``from_pretrained`` return models from their configurations, permanently in this process."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel

    def from_pretrained(cls: Any, name: Any = None, *_: Any, config: Any = None, **named: Any) -> Any:
        if config is None:
            config = cls.config_class.from_pretrained(name)
        quantized = named.get("quantization_config") or getattr(config, "quantization_config", None)
        if quantized is not None or named.get("load_in_4bit") or named.get("load_in_8bit"):
            raise ConfigError(_QUANTIZED)
        for key, value in named.items():
            if hasattr(config, key) and key not in _OF_LOADING:
                setattr(config, key, value)
        dtype = named.get("dtype", named.get("torch_dtype", "auto"))
        options = {"attn_implementation": named["attn_implementation"]} if named.get("attn_implementation") else {}
        made = cls._from_config(config, dtype=_dtype_of(config, dtype), **options)
        made.eval()
        return made

    kind.from_pretrained = classmethod(from_pretrained)


_OF_LOADING = ("dtype", "torch_dtype", "attn_implementation", "device_map", "name_or_path")


def _dtype_of(config: Any, dtype: Any) -> Any:
    import torch

    if dtype in (None, "auto"):
        dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def _guard_values(launched: Launched | None) -> None:
    """Refuse reads of a tensor's value by the script itself, not by libraries; None: allow them again."""
    from torch._subclasses.fake_tensor import FakeTensor

    fake: Any = FakeTensor
    for name in ("__bool__", "__int__", "__index__"):
        if name in vars(fake):
            delattr(fake, name)
        if launched is None:
            continue
        inherited = getattr(fake, name)

        def guarded(tensor: Any, inherited: Any = inherited) -> Any:
            if _is_own(sys._getframe(1).f_code.co_filename, launched):
                raise _StopError("it depends on a tensor's value, which a dry run does not have")
            return inherited(tensor)

        setattr(fake, name, guarded)


def _is_own(filename: str, launched: Launched) -> bool:
    """Return whether a file is the script's own, not a library's."""
    home = os.getcwd() if launched.is_module else os.path.dirname(os.path.realpath(launched.script))
    found = os.path.realpath(filename)
    return found.startswith(home + os.sep) and "site-packages" not in found and not found.startswith(_TRAINER)


_TRAINER = str(Path(__file__).resolve().parent.parent) + os.sep


def _late(_number: int, _frame: object) -> NoReturn:
    raise _StopError(f"it has not called deepspeed.initialize within {_MOST_SECONDS // 60} min")


def _place(error: BaseException, launched: Launched) -> str:
    """Return the place of an error in the script, or in its own file nearest to the error."""
    found = launched.script
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if _is_own(name, launched):
            found = f"{os.path.relpath(name)}:{line}"
    return found


def _why(error: BaseException) -> str:
    """Return in one line the meaning of a script's error for a dry run."""
    if text := fake.refusal(error):
        return text
    if isinstance(error, (ConfigError, _StopError)):
        return str(error)
    text = " ".join(str(error).split())[:_MOST_CHARACTERS]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_OFFLOAD = "zero_optimization.offload_optimizer="
NOT_CHANGED = (
    "a script makes its model, optimizer and loss itself, so LoRA, other optimizers and a fused loss are not among the "
    "changes; --model with --lora-rank or --optimizer predicts them"
)


def words(changes: Sequence[str], script_inputs: ScriptInputs) -> str:
    """Return the settings of the script for changes (assignments to DeepSpeed's keys, flags of ``predict``)."""
    return " ".join(_one(change, script_inputs) for change in changes)


def refusal(changes: Sequence[str], script_inputs: ScriptInputs) -> str:
    """Return the reason why these changes do not apply to the script; empty if they do."""
    if not script_inputs.optimizer or not any(change.startswith(_OFFLOAD) for change in changes):
        return ""
    if deepspeed_file.offloads(script_inputs.deepspeed) or script_inputs.optimizer in ADAMS:
        return ""
    return f"the script makes {script_inputs.optimizer} itself; DeepSpeed offloads its own CPUAdam and CPULion only"


def _one(change: str, script_inputs: ScriptInputs) -> str:
    key, _, value = change.partition("=")
    if key == "--checkpointing":
        return "gradient_checkpointing=True" if script_inputs.trainer else "model.gradient_checkpointing_enable()"
    if key == "--micro-batch":
        if script_inputs.trainer:
            return f"per_device_train_batch_size={value}"
        return f"train_micro_batch_size_per_gpu={value} (and batches of {value} rows)"
    if key == "--accumulation":
        return f"gradient_accumulation_steps={value}"
    if change.startswith(_OFFLOAD) and script_inputs.optimizer in ADAMS and not script_inputs.trainer:
        return f"{change} deepspeed.ops.adam.DeepSpeedCPUAdam in place of its {script_inputs.optimizer}"
    return change
