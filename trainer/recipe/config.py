"""The trainer's configuration: one struct a section, a docstring behind every field.

The docstrings are what ``ftmon train --print-config`` writes as comments, and the constraints are what a value that is
out of range is refused by, so a field is described in one place. Nothing in here imports torch.
"""

from typing import Annotated, Any, Literal

import msgspec

AtLeast0 = Annotated[int, msgspec.Meta(ge=0)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Momentum = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every section of the configuration is."""


class Model(Section, frozen=True):
    """The model to train: one of `name` and `config` is needed."""

    name: str = ""
    """Name on the Hugging Face hub, or a local folder, whose weights are fine-tuned."""
    config: dict[str, Any] = {}
    """A bare configuration for random weights: `model_type` (llama, qwen2, ...) and that type's own sizes."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; auto lets transformers choose."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of full fine-tuning, when `rank` is above 0."""

    rank: AtLeast0 = 0
    """Rank of the adapters; 0 trains all weights."""
    alpha: Positive = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Momentum = 0.0
    """Dropout before the adapters."""
    targets: list[str] = []
    """Names of the layers that get adapters, such as [q_proj, v_proj]; empty: all linear layers."""
    merge: bool = True
    """Merge the adapters into the final model, so that it loads without peft."""


class Tokenizer(Section, frozen=True):
    """The tokenizer."""

    name: str = ""
    """Hub name or local folder; empty: the model's own, and with a bare configuration one trained on the data."""
    vocab_size: Annotated[int, msgspec.Meta(ge=300)] = 4096
    """Size of the vocabulary of a tokenizer that is trained on the data."""


class Data(Section, frozen=True):
    """The training data: one of `path` and `name` is needed."""

    path: str = ""
    """A local file: .jsonl (or .json with one record a line) or .parquet."""
    name: str = ""
    """Name of a data set on the Hugging Face hub, read through `datasets`."""
    subset: str = ""
    """Configuration of that data set, where it has several."""
    split: str = "train"
    """Split of that data set, in the syntax of `datasets`: train, train[:10%] ..."""
    format: Literal["auto", "text", "instruction", "chat"] = "auto"
    """What a record is: plain text, a prompt with its response, or chat messages; auto goes by the columns."""
    text_column: str = "text"
    """Column of the text."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    response_column: str = "response"
    """Column of the response; loss is counted on it alone."""
    messages_column: str = "messages"
    """Column of the messages, each with `role` and `content`; loss is counted on the assistant's alone."""
    train_on_prompt: bool = False
    """Count the loss on prompts too."""
    packing: bool = False
    """Join examples into full sequences (they then see each other) instead of padding each."""
    shuffle: bool = True
    """Visit the examples in a new order each epoch, drawn from `training.seed`."""
    limit: AtLeast0 = 0
    """Use only the first so many records; 0: all."""
    workers: AtLeast0 = 0
    """Data-loading processes a rank; 0 loads in the rank itself."""


class Zero(Section, frozen=True):
    """DeepSpeed ZeRO."""

    stage: Literal[0, 1, 2, 3] = 2
    """What is partitioned over ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer's states in host memory and step there (stages 1 to 3)."""
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1 << 16)] = 200_000_000
    """Size of the buckets that gradients are reduced and parameters gathered in."""
    overlap: bool = True
    """Overlap gradient reduction with the backward pass (GPUs)."""


class Optimizer(Section, frozen=True):
    """AdamW."""

    lr: Positive = 2e-5
    """Peak learning rate."""
    beta1: Momentum = 0.9
    """Decay of the running mean."""
    beta2: Momentum = 0.999
    """Decay of the running square."""
    eps: Positive = 1e-8
    """Added to the root of the running square."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay; biases and norms get none."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0: not at all."""
    kind: Literal["auto", "deepspeed", "torch", "torch_foreach", "torch_fused"] = "auto"
    """Adam variant. auto: DeepSpeed's CPU Adam with offload, torch_fused on GPUs, torch (one tensor after the other) on
    the CPU. torch_foreach is PyTorch's default; its temporaries make a spike in the optimizer step."""


class Schedule(Section, frozen=True):
    """The learning rate over time."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: AtLeast0 = 0
    """Steps over which the rate rises linearly from 0 to `optimizer.lr`."""
    final_ratio: Fraction = 0.1
    """What the rate ends at, as a share of `optimizer.lr` (linear and cosine)."""


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
    """Check: micro_batch x grad_accumulation x ranks must be this; 0: no check."""
    sequence_length: Annotated[int, msgspec.Meta(ge=8)] = 1024
    """Longest sequence, in tokens; longer ones are cut off at their end."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Of forward and backward; the optimizer keeps fp32 weights. auto: bf16 on GPUs, fp32 on the CPU."""
    seed: AtLeast0 = 42
    """Of weights, data order and dropout."""


class Checkpoint(Section, frozen=True):
    """Checkpoints that a run resumes from; the final model is written besides."""

    every: AtLeast0 = 0
    """Steps between checkpoints; 0: only when asked to stop."""
    keep: AtLeast1 = 2
    """How many to keep; older ones are removed."""
    at_end: bool = False
    """Write one at the end of training too."""
    resume: str = "never"
    """never; auto: from the newest in `output.dir` when there is one; or the path of a checkpoint or output folder."""


class Output(Section, frozen=True):
    """Where results go."""

    dir: str = ""
    """Output folder: `checkpoints/` and the final `model/` lie in it; empty: `output/` in the run directory."""
    overwrite: bool = False
    """Begin anew in an output folder that already holds checkpoints or a model."""
    save_model: bool = True
    """Write the final model, in the form that AutoModelForCausalLM.from_pretrained loads."""
    log_every: AtLeast1 = 10
    """Steps between progress lines."""


class Run(Section, frozen=True):
    """Where it runs."""

    name: str = ""
    """Name of the run; empty: the configuration file's."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: the GPUs where there are any, else the CPU."""
    ranks: AtLeast0 = 0
    """Number of ranks; 0: one on each visible GPU, 1 on the CPU."""
    threads: AtLeast0 = 0
    """Host compute threads of a rank; 0: cores / ranks."""
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """TCP port the ranks meet at; 0: a free one."""


class Debug(Section, frozen=True):
    """For trying the monitor out."""

    fault: str = ""
    """Make a real fault happen: spike, hang, slow, oom, crash or stop, such as hang:rank=1,step=12."""


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
    checkpoint: Checkpoint = msgspec.field(default_factory=Checkpoint)
    output: Output = msgspec.field(default_factory=Output)
    run: Run = msgspec.field(default_factory=Run)
    debug: Debug = msgspec.field(default_factory=Debug)
