"""A dry run: DeepSpeed's real engine and a real training step on fake tensors, one rank of many."""

import contextlib
import copy
import importlib
import importlib.util
import os
import re
import traceback
import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.analysis.estimates.time import Work
from ...protocol.errors import ConfigError
from ...protocol.host.machine import GPUS, Gpu
from ..recipe.model.shape import positions
from . import deepspeed_file, explain, fake, result
from .record import Event, Recorder, Trace
from .result import Phase, Rank

H200 = next(gpu for gpu in GPUS if gpu.pattern == "H200")
_WARM_UP_LENGTH = 8
_MOST_CHARACTERS = 300  # Limit of a library's refusal, which may continue with values or a list of kernels
_PYDANTIC = re.compile(r"\d+ validation errors? for \w+ (\S+) (.*?) \[type=")


@dataclass(frozen=True)
class Job:
    """A plain DeepSpeed loop: ``loss = engine(**batch).loss``, ``engine.backward(loss)``, ``engine.step()``."""

    shape: Any  # transformers' configuration (``model.read_config``); None: the result of ``_make`` has its own
    deepspeed: dict[str, Any]
    ranks: int = 1
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: bool = False
    lora_rank: int | None = None
    attention: str = "sdpa"
    allocator: Settings = field(default_factory=Settings)
    gpu: Gpu = H200
    sequence_parallel_size: int = 1  # Ranks that share each sequence


@dataclass
class Measured:
    """Result of one length on one rank."""

    rank: Rank
    events: list[Event]  # Events from the start of the process to the end of the steps at this length
    work: Work  # Work of one step
    micro_step: Work  # Of that, a micro-step between the first and the last; empty if there is none
    start: int  # Number of events before the step that the rank's peaks are of


_LOOK_FOR_CUDA = ("torch._dynamo", "bitsandbytes")
"""Imported before the fake GPU: one makes tables of torch.cuda's functions, the other needs the real ones."""


_modes: list[Any] = []  # The mode of this process's fake tensors, in which compiled layers have been traced


class DryRun:
    """One rank of a job; only one per process, or the same rank with other layers after it."""

    def __init__(self, job: Job, rank: int = 0) -> None:
        """Make the model and the engine; raise ``ConfigError`` if DeepSpeed or transformers refuse it."""
        warnings.filterwarnings("ignore")
        self.job = job
        self._rank = rank
        fake.prepare(job.ranks, rank)
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        for name in _LOOK_FOR_CUDA:
            if importlib.util.find_spec(name) is not None:
                importlib.import_module(name)
        from ..probe.values.model_flops import model_flops
        from .composition import Sightings
        from .record import Counting

        self._torch = torch
        self.trace = Trace(job.allocator)
        self._counting = Counting(job.ranks, job.sequence_parallel_size)
        if not _modes:
            _modes.append(FakeTensorMode(allow_non_fake_inputs=True))
            _modes[0].cache_enabled = False  # ``record.ResultCache`` has most of its hits, which its keys outweigh
        self._fake = _modes[0]
        self._recorder = Recorder(self.trace, fake.hidden(job.gpu.capability), self._counting, self._fake)
        fake.Device(self._recorder, job.gpu).install()
        fake.install_attention(job.gpu.capability)
        fake.join(job.ranks, rank)
        fake.patch(self._counting.update, self._fetched)
        fake.patch_tensors()
        self.engine: Any = None
        self._sightings = Sightings(self._recorder)
        self._phases: dict[str, Phase] = {}
        self._made = False
        self.making_bytes = 0  # Highest memory while the model is made, on the host
        with self._fake, self._recorder, _refusals():
            self.trace.begin("init")
            self._make()
            self._note("init")
            # As in a script that makes it on the GPU, where an output layer exists in addition to its tied embedding.
            self._count("init", self.making_bytes, self.making_bytes)
            self.flops = self.engine and model_flops(self.engine.module)
            self.made = self.engine and explain.made(self.engine, self.parameters, job.ranks)
            self._recorder.vocabulary = self.made.vocabulary if self.made else 0
            known = self.engine and positions(getattr(self.engine.module, "config", None))
            self.positions = known.most if known else 0  # Maximum sequence length of the model in tokens; 0: not known

    def _make(self) -> None:
        import deepspeed

        torch, job = self._torch, self.job
        settings = self._batched_settings()
        stage = deepspeed_file.stage(settings)
        partitioned = deepspeed.zero.Init(config_dict_or_path=settings) if stage == 3 else contextlib.nullcontext()
        config = copy.deepcopy(job.shape)
        self.vocabulary = int(config.get_text_config().vocab_size)
        with partitioned:
            model = result.make(config, _dtype(settings, torch), job.checkpointing, job.lora_rank, job.attention)
        self.making_bytes = 0 if stage == 3 else self.trace.host_peak
        trained: Any = self._count_parameters(model)
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)

    def _batched_settings(self) -> dict[str, Any]:
        """Return DeepSpeed's settings with the job's batch."""
        job = self.job
        return copy.deepcopy(job.deepspeed) | {
            "train_micro_batch_size_per_gpu": job.micro_batch,
            "gradient_accumulation_steps": job.accumulation,
            "train_batch_size": job.micro_batch * job.accumulation * job.ranks,
            "steps_per_print": 1 << 30,
        }

    def _count_parameters(self, model: Any) -> list[Any]:
        """Count a model's parameters, and return the trained ones."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())
        self.trainable = sum(int(getattr(p, "ds_numel", p.numel())) for p in trained)
        return trained

    def measure(self, length: int, in_turn: bool = False) -> Measured:
        """Return the memory and the work of a steady step at a sequence length in tokens.

        The first step allocates memory that later ones keep: optimizer states, workspaces, ZeRO-3's order of layers. It
        has the full length, as in a run: the kept memory is then placed in the large segments of freed activations, so
        later steps need more memory than in a process with a short first step.

        ``in_turn``: as in a process that measures one length after the other: its first step is a short one, and cached
        memory is freed before each length. Without it, this must be the first measurement. Raises ``ConfigError`` if an
        operation cannot run on fake tensors.
        """
        from .composition import compose

        with self._fake, self._recorder, _refusals():
            first = len(self.trace.events)
            if in_turn:
                if not self._made:
                    self._step(_WARM_UP_LENGTH)
                    self._made = True
                self.trace.empty_cache()
            else:
                if self._updates_alone:
                    self._sightings.begin(self.engine)
                self._counting.clear()
                self._step(length)
            # Not the first step's: a steady step begins with the segments that the previous one reserved.
            start = len(self.trace.events)
            if in_turn or not self._updates_alone or not self._update_again(first):
                self._counting.clear()
                self._sightings.begin(self.engine)
                self._step(length)
            self._sightings.watching = False
            work, micro_step = self._counting.work(), self._counting.micro_step()
            end = len(self.trace.events)
            again, start = self.trace.repeat(start), end
            if again is None:
                self._sightings.watching = True
                self._step(length)
                self._sightings.watching = False
            else:
                self._phases = {"init": self._phases["init"]}
                for phase, peaks in again:
                    self._count(phase, peaks.allocated_bytes, peaks.reserved_bytes)
        for phase, (parts, logits) in compose(self.trace, start).items():
            logits = {part: size for part, size in logits.items() if size}
            self._phases[phase] = msgspec.structs.replace(self._phases[phase], parts=parts, logits=logits)
        rank = Rank(self._rank, dict(self._phases), self.trace.host_peak)
        return Measured(rank, list(self.trace.events), work, micro_step, start)

    _updates_alone = False  # Whether the passes of a second step allocate what those of the first did

    def _update_again(self, first: int) -> bool:
        """Record a second step with the passes of the first one, since an event; return whether they repeat."""
        raise NotImplementedError

    def _step(self, length: int) -> None:
        for name in ("forward", "backward", "optimizer"):
            self._phases.pop(name, None)
        torch, engine = self._torch, self.engine
        for _ in range(self.job.accumulation):
            tokens = torch.zeros((self.job.micro_batch, length), dtype=torch.long, device="cuda")
            self._begin("forward")
            loss = engine(input_ids=tokens, labels=tokens).loss
            self._note("forward")
            self._begin("backward")
            engine.backward(loss)
            del loss
            self._note("backward")
            self._begin("optimizer")
            engine.step()
            self._note("optimizer")

    def _fetched(self, module: Any) -> None:
        recursing = bool(getattr(module, "_z3_leaf", False))  # all at once: ``set_z3_leaf_module``
        gathered = sum(1 for _ in module.parameters(recurse=recursing))
        self._counting.fetches += (1 + gathered / 5) * self._counting.times
        self._sightings.fetched(module)

    def _begin(self, phase: str) -> None:
        self._sightings.boundary(phase)
        self._recorder.in_backward = phase == "backward"
        self.trace.begin(phase)

    def _note(self, phase: str) -> None:
        """Record a phase's peaks, the highest of several micro-steps."""
        self._recorder.in_backward = False
        peaks = self.trace.end(phase)
        self._count(phase, peaks.allocated_bytes, peaks.reserved_bytes)
        self._sightings.boundary(phase)

    def _count(self, phase: str, allocated: int, reserved: int) -> None:
        before = self._phases.get(phase)
        if before is not None:
            allocated = max(allocated, before.allocated_peak_bytes)
            reserved = max(reserved, before.reserved_peak_bytes)
        self._phases[phase] = Phase(allocated, reserved)


def _dtype(settings: dict[str, Any], torch: Any) -> Any:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if settings.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


@contextlib.contextmanager
def _refusals() -> Generator[None]:
    """Convert errors of DeepSpeed, transformers and fake tensors to one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # DeepSpeed's errors have various classes, some derived from Exception itself
        if os.environ.get("FTMON_DEBUG"):
            raise
        if text := fake.refusal(error):
            raise ConfigError(text) from None
        text = " ".join(str(error).split())
        if found := _PYDANTIC.match(text):  # only key and message: "zero.stage: Input should be ..."
            text = f"{found[1]}: {found[2]}"
        text = text[:_MOST_CHARACTERS] or type(error).__name__
        raise ConfigError(f"{_place(error)}: {text}") from None


def _place(error: BaseException) -> str:
    """Return the package that raised an error: deepspeed, transformers, torch or another."""
    found = "dry run"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in ("deepspeed", "transformers", "peft"):
            found = package
    return found
