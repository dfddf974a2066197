"""The whole configuration: one section for each component."""

from typing import Annotated, Any, Literal

import msgspec

from ..checkpoint.config import Checkpoint
from ..data.config import Data
from ..engine.config import Zero
from ..evaluation.config import Evaluation
from ..model.config import Lora, Model, Tokenizer
from ..optim.config import Optimizer, Schedule
from .fields import MOST_WHOLE, AtLeast0, AtLeast1, Positive, Section, Seed

Length = Annotated[int, msgspec.Meta(ge=8, le=MOST_WHOLE)]
"""Of a sequence, in tokens."""


class Training(Section, frozen=True):
    """How much, and in what portions."""

    max_steps: AtLeast0 = 0
    """Optimizer steps to train; 0: as many as `epochs` take."""
    epochs: Positive = 1.0
    """Passes over the data, when `max_steps` is 0."""
    micro_batch: AtLeast1 = 1
    """Sequences in one forward pass of one rank."""
    grad_accumulation: AtLeast1 = 1
    """Forward and backward passes before each optimizer step."""
    total_batch: AtLeast0 = 0
    """Check: micro_batch x grad_accumulation x ranks / sequence_parallel_size must be this; 0: no check."""
    sequence_length: Length = 1024
    """Longest sequence, in tokens; `data.truncation` decides about longer ones."""
    sequence_parallel_size: AtLeast1 = 1
    """Ranks that share each sequence, each computing a slice of it (Ulysses): for lengths that one GPU does not hold.
    The ranks must be a multiple of it, and it must divide the attention heads; 1: each rank has whole sequences."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of forward and backward; the optimizer keeps fp32 weights. auto: bf16 on GPUs, fp32 on the CPU."""
    seed: Seed = 42
    """Of weights, data order and dropout."""
    stop_after_nan: AtLeast1 = 3
    """End training after so many reported losses in a row that are not a number; no checkpoint is written then."""
    max_skipped: AtLeast1 = 40
    """End training after so many updates in a row that were left out because gradients overflowed."""
    rehearsal: bool = True
    """Before the first step, also of a run that resumes, take a step on the longest micro-batch that changes nothing:
    what does not fit fails now."""


class Output(Section, frozen=True):
    """Where results go."""

    dir: str = ""
    """Output folder: `checkpoints/` and the final `model/` lie in it; empty: `output/` in the run directory."""
    overwrite: bool = False
    """Begin anew in an output folder that already holds checkpoints or a model."""
    save_model: bool = True
    """Write the final model, in the form that AutoModelForCausalLM.from_pretrained loads."""
    push: str = ""
    """Repository on the Hugging Face hub, such as me/my-model, that the final model is uploaded to; empty: none."""
    log_every: AtLeast1 = 10
    """Steps between progress lines in the log of rank 0; the console has a line every two seconds."""


class Run(Section, frozen=True):
    """Where it runs."""

    name: str = ""
    """Name of the run; empty: the configuration file's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: the GPUs where there are any, else the CPU."""
    ranks: AtLeast0 = 0
    """Number of ranks; 0: one on each visible GPU, 1 on the CPU."""
    threads: AtLeast0 = 0
    """Host compute threads of a rank; 0: cores / ranks where the host computes (CPU ranks, an offloaded optimizer), at
    most 4 where a GPU does: waking many for small tensors costs milliseconds."""
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """TCP port the ranks meet at; 0: a free one."""


class Debug(Section, frozen=True):
    """For trying the monitor out."""

    fault: str = ""
    """Make a real fault happen: spike, hang, slow, oom, crash or stop, such as hang:rank=1,step=12."""
    lengths: list[Length] = msgspec.field(default_factory=list[Length])
    """Measure instead of training: take training.max_steps steps at each of these sequence lengths, one after the
    other, on the longest rows cut to it, and keep nothing. What a sweep with one_process runs."""


class Config(Section, frozen=True):
    """Configuration of ftmon's trainer."""

    model: Model = msgspec.field(default_factory=Model)
    lora: Lora = msgspec.field(default_factory=Lora)
    tokenizer: Tokenizer = msgspec.field(default_factory=Tokenizer)
    data: Data = msgspec.field(default_factory=Data)
    zero: Zero = msgspec.field(default_factory=Zero)
    optimizer: Optimizer = msgspec.field(default_factory=Optimizer)
    schedule: Schedule = msgspec.field(default_factory=Schedule)
    training: Training = msgspec.field(default_factory=Training)
    evaluation: Evaluation = msgspec.field(default_factory=Evaluation)
    checkpoint: Checkpoint = msgspec.field(default_factory=Checkpoint)
    output: Output = msgspec.field(default_factory=Output)
    run: Run = msgspec.field(default_factory=Run)
    debug: Debug = msgspec.field(default_factory=Debug)
    deepspeed: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Any other keys of DeepSpeed's own configuration, applied on top of the sections above."""
