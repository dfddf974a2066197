"""The configuration: one section for each component, and the types of their fields.

Every field has a docstring behind it, which ``ftmon train --print-config`` writes as its comment. Nothing here imports
torch.
"""

from typing import Annotated, Any, Literal

import msgspec

MOST_WHOLE = 10**15
"""The largest whole number where a field has no bound of its own: recordings and PyTorch hold 64 bits, and counts are
multiplied with one another."""
MOST_SEED = 2**32 - 1
"""PyTorch's seeds have 64 bits; the order of an epoch is drawn from the seed times a million and more."""

AtLeast0 = Annotated[int, msgspec.Meta(ge=0, le=MOST_WHOLE)]
AtLeast1 = Annotated[int, msgspec.Meta(ge=1, le=MOST_WHOLE)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=MOST_SEED)]
Fraction = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=0.5)]
Momentum = Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)]
Positive = Annotated[float, msgspec.Meta(gt=0.0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
Length = Annotated[int, msgspec.Meta(ge=8, le=MOST_WHOLE)]
"""Of a sequence, in tokens."""
CHOSEN = "chosen"
_CHOSEN = msgspec.Meta(extra={CHOSEN: True})
"""Marks a setting that may be ``auto``: ``ftmon train`` chooses its value by dry runs (``Loaded.chosen``)."""
COMMAS = "commas"
_COMMAS = msgspec.Meta(extra={COMMAS: True})
"""Marks a list that may also be one text, with commas."""
Format = Literal["auto", "text", "instruction", "alpaca", "chat", "sharegpt", "markers"]
Change = Literal["seed", "data", "sequence_length", "micro_batch", "grad_accumulation", "ranks"]


OFF: dict[str, dict[str, Any]] = {"evaluation": {"share": 0.0, "every": 0}}
"""Sections that may be `off` (or false, no), and the values that this means."""


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the configuration's sections."""


class Model(Section, frozen=True):
    """The model to train: one of `name` and `config` is needed."""

    name: str = ""
    """Name on the Hugging Face hub, or a local folder, whose weights are fine-tuned."""
    config: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """A bare configuration for random weights: `model_type` (llama, qwen2, ...) and that type's own sizes."""
    overrides: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Values of the configuration of `name` to replace, by transformers' names (attention_dropout: 0.1, rope_scaling:
    {rope_type: yarn, factor: 4}, router_aux_loss_coef: 0.01); no sizes of weights. A section within is merged."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention implementation; auto lets transformers choose."""
    quantization: Literal["none", "nf4"] = "none"
    """Hold the frozen base in 4 bits (QLoRA: NF4 with double quantization, bitsandbytes); needs `lora.rank` and `name`,
    and ZeRO stage 0 to 2."""
    fused_loss: Literal["auto", "on", "off"] = "auto"
    """Compute the loss in chunks of label tokens, without logits at full size: the same loss with less memory. auto:
    where a check of the model finds it to be the same; on: refuse other models."""
    gradient_checkpointing: Annotated[
        Literal["none", "layers", "selective"], msgspec.Meta(extra={"true": "layers", "false": "none", CHOSEN: True})
    ] = "none"
    """What the backward pass recomputes of decoder layers. layers: everything from their inputs (about a third more
    time); selective: all but matrix products and attention outputs, which are kept. true is layers, false is none.
    auto: chosen by dry runs."""
    checkpoint_every: AtLeast1 = 1
    """Recompute every n-th decoder layer, and keep the activations of the others."""
    activation_offload: Literal["none", "inputs", "all"] = "none"
    """Hold saved activations of decoder layers in host memory between forward and backward. inputs: the inputs of
    recomputed layers; all: also what layers that are not recomputed save, above `offload_bytes`."""
    offload_bytes: AtLeast0 = 1_048_576
    """Size from which `activation_offload: all` moves a tensor; smaller ones stay."""
    compile: Literal["auto", "off", "layers"] = "auto"
    """layers: compile the decoder layers (torch.compile) before the first step; needs `data.packing`. auto: on GPUs,
    where nothing excludes it."""
    activation_memory_budget: Fraction = 1.0
    """Share of their activations that compiled layers keep; what is cheapest to compute again is left out first. Needs
    `compile: layers`, and no `gradient_checkpointing`."""


class Lora(Section, frozen=True):
    """Low-rank adapters (peft) instead of full fine-tuning, when `rank` is above 0."""

    rank: Annotated[AtLeast0, _CHOSEN] = 0
    """Rank of the adapters; 0 trains all weights. auto: 0 if all weights fit, else 16."""
    kind: Literal["lora", "dora"] = "lora"
    """lora, or dora: the weights' magnitudes are trained too (weight-decomposed; slower)."""
    alpha: Positive = 16.0
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: Momentum = 0.0
    """Dropout before the adapters."""
    targets: list[str] = msgspec.field(default_factory=list[str])
    """Names of the layers that get adapters, such as [q_proj, v_proj]; empty: all linear layers."""
    merge: bool = True
    """Merge the adapters into the final model, so that it loads without peft."""


class Tokenizer(Section, frozen=True):
    """The tokenizer."""

    name: str = ""
    """Hub name or local folder; empty: the model's own, and with a bare configuration one trained on the data."""
    vocab_size: Annotated[int, msgspec.Meta(ge=300, le=MOST_WHOLE)] = 4096
    """Size of the vocabulary of a tokenizer that is trained on the data."""
    special_tokens: list[str] = msgspec.field(default_factory=list[str])
    """Special tokens to add, such as ["<|tool|>"]; embeddings are resized where the model has too few. They are trained
    with all weights, not with adapters."""


class File(Section, frozen=True):
    """One file of several."""

    path: str
    """The file; see `data.path`."""
    weight: Positive = 1.0
    """How often each of its records is used in an epoch: 2 uses all twice, 0.5 a half drawn with `training.seed`."""


class Data(Section, frozen=True):
    """The training data: one of `path`, `files` and `name` is needed."""

    path: str = ""
    """A local file: .jsonl (one JSON record a line), .json (the same, or one list), .csv, .tsv, .parquet or .txt (one
    text a line)."""
    files: list[File] = msgspec.field(default_factory=list[File])
    """Several such files, each with its weight: [{path: a.jsonl, weight: 1}, ...]."""
    name: str = ""
    """Name of a data set on the Hugging Face hub, or a folder with a copy of one; read through `datasets`."""
    subset: str = ""
    """Configuration of that data set, where it has several."""
    split: str = "train"
    """Split of that data set, in the syntax of `datasets`: train, train[:10%] ..."""
    format: Format = "auto"
    """What a record is: text, instruction (prompt and response or completion), alpaca (instruction, input, output),
    chat (messages with role and content), sharegpt (conversations with from and value), markers (a text with Human:
    and Assistant:, [INST] or <|im_start|>); auto goes by the first record."""
    text_column: str = "text"
    """Column of the text, also of a text with markers."""
    prompt_column: str = "prompt"
    """Column of the prompt."""
    response_column: str = "response"
    """Column of the response; `completion` is found too."""
    messages_column: str = "messages"
    """Column of the messages; `conversations` is found too."""
    tools_column: str = "tools"
    """Column of the tools that a chat may call: a list of JSON schemas, or JSON text of it or of each; passed to the
    template."""
    chat_template: str = ""
    """Chat template: empty takes the tokenizer's; the name of one that ships with ftmon (plain, chatml, llama2,
    llama3, gemma, mistral, phi3), or the path of a Jinja file; none joins prompt and response as they stand."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Values of the chat template's own variables, such as {enable_thinking: false}; saved in the model's template as
    defaults."""
    train_on: Literal["assistant", "last", "completion", "all"] = "assistant"
    """Which tokens carry loss: all assistant turns, the last one, what follows the prompt (the last user message, if
    the record does not separate a prompt), or all. A text is learned whole."""
    truncation: Literal["auto", "keep_start", "keep_end", "drop", "split"] = "auto"
    """What happens to records longer than `training.sequence_length`: their start or end is kept, they are dropped, or
    (text only) split into several. auto: split for text, keep_start for others."""
    max_refused: Fraction = 0.01
    """Share of records that may be refused (broken, of another format, rejected by the template) before the run is;
    they are never trained on."""
    packing: bool | Literal["auto"] = "auto"
    """Put several records into each sequence, without cutting any; they do not see each other. auto: where a check of
    the model's attention finds that they do not, and the data fill a step."""
    group_by_length: bool = True
    """Without packing: batches of records of similar length, so that less is padded."""
    shuffle: bool = True
    """Visit the examples in a new order each epoch, drawn from `training.seed`."""
    limit: AtLeast0 = 0
    """Use only the first so many records; 0: all."""
    processes: AtLeast0 = 0
    """Processes that tokenize; 0: by the numbers of records and cores."""
    workers: AtLeast0 = 0
    """Data-loading processes a rank; 0 loads in the rank itself."""


class Zero(Section, frozen=True):
    """DeepSpeed ZeRO."""

    stage: Annotated[Literal[0, 1, 2, 3], _CHOSEN] = 2
    """What is partitioned over ranks: 0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters. In half
    precision 0 runs as 1, and so does 2 on one rank in bf16. Not given: 1 in bf16 on several GPUs for a model of up to
    2 B parameters, which is faster. auto: chosen by dry runs."""
    offload_optimizer: Annotated[bool, _CHOSEN] = False
    """Keep the optimizer's states in host memory and step there (stages 1 to 3). auto: where nothing else holds all
    weights."""
    bucket_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=MOST_WHOLE)] = 200_000_000
    """Size of the buckets that gradients are reduced and parameters gathered in."""
    offload_parameters: bool = False
    """Keep the parameters in host memory between their uses (stage 3)."""
    overlap: bool = True
    """Overlap gradient reduction with the backward pass (GPUs)."""
    grad_accum_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type that gradients are accumulated in over micro-steps. auto: fp32; without master weights the training
    precision."""
    communication_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Data type that gradients are reduced in over ranks; auto: fp32. The training precision halves the traffic and
    rounds each sum."""


class Optimizer(Section, frozen=True):
    """AdamW, or Muon."""

    lr: Positive | Literal["auto"] = "auto"
    """Peak learning rate. auto: 2e-4 for adapters (`lora.rank`), 2e-5 for all weights."""
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
    kind: Literal["auto", "deepspeed", "torch", "torch_foreach", "torch_fused", "adamw_bf16", "adamw_8bit", "muon"] = (
        "auto"
    )
    """auto: AdamW: DeepSpeed's CPU Adam with offload, torch_fused on GPUs, torch (one tensor after another) on the CPU.
    torch_foreach is PyTorch's default; its temporaries make a spike in the optimizer step. adamw_bf16 and adamw_8bit
    hold both running averages in 2 bytes or 1, rounded stochastically. muon: Muon for the hidden matrices, AdamW for
    embeddings, output layer, norms and biases."""
    master_weights: Literal["fp32", "none"] = "fp32"
    """What updates are added to in half precision. none: to the bf16 weights themselves, rounded stochastically; with
    adamw_bf16 or adamw_8bit, and training.precision=bf16."""
    muon_lr: Positive = 0.02
    """Peak learning rate of the matrices that Muon updates; the others have `lr`."""
    muon_momentum: Momentum = 0.95
    """Decay of Muon's running mean (Nesterov)."""


class Schedule(Section, frozen=True):
    """The learning rate over time."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after the warm-up."""
    warmup_steps: AtLeast0 | Literal["auto"] = "auto"
    """Steps over which the rate rises linearly from 0 to `optimizer.lr`. auto: `warmup_ratio` of all steps."""
    warmup_ratio: Fraction = 0.03
    """Share of all steps that the warm-up takes, rounded down to whole steps, where `warmup_steps` is auto."""
    final_ratio: Fraction = 0.1
    """What the rate ends at, as a share of `optimizer.lr` (linear and cosine)."""


class Training(Section, frozen=True):
    """How much, and in what portions."""

    max_steps: AtLeast0 = 0
    """Optimizer steps to train; 0: as many as `epochs` take."""
    epochs: Positive = 1.0
    """Passes over the data, when `max_steps` is 0."""
    micro_batch: Annotated[AtLeast1, _CHOSEN] = 1
    """Sequences in one forward pass of one rank. auto: chosen by dry runs."""
    grad_accumulation: AtLeast1 | Literal["auto"] = "auto"
    """Forward and backward passes before each optimizer step. auto: as many as make `total_batch`, or else a batch of
    32 sequences over all ranks, of fewer where an epoch would have less than ten steps."""
    total_batch: AtLeast0 = 0
    """Sequences in a step: micro_batch x grad_accumulation x ranks / sequence_parallel_size must be this; 0: free."""
    sequence_length: Annotated[Length, _CHOSEN] = 1024
    """Longest sequence, in tokens; `data.truncation` decides about longer ones. auto: by the lengths of the records."""
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

    @property
    def micro_steps(self) -> int:
        """`grad_accumulation` as a number: 1 as long as it is auto, until `support.settle_batch`."""
        return 1 if self.grad_accumulation == "auto" else self.grad_accumulation


class Evaluation(Section, frozen=True):
    """Loss on examples that are not trained on: of `path`, `split`, or else a `share`; `evaluation: off`: none."""

    path: str = ""
    """A local file, in the form of `data.path`."""
    split: str = ""
    """A split of the data set `data.name`, such as validation."""
    share: Share | Literal["auto"] = "auto"
    """Share of the training records that is set aside for evaluation, drawn from `training.seed`; 0: none. auto: 2 %
    of 1,000 records or more, or where `every`, `patience` or `samples` ask for it, and without `path` and `split`."""
    every: AtLeast0 | Literal["auto"] = "auto"
    """Steps between evaluations; 0: at the end alone. auto: ten evaluations."""
    at_end: bool = True
    """Evaluate after the last step."""
    limit: AtLeast0 = 0
    """Evaluate on the first so many examples; 0: all, of an auto `share` as large a part as is trained of an epoch."""
    micro_batch: AtLeast0 = 0
    """Sequences in one forward pass of one rank; 0: `training.micro_batch`, and where that is of packed rows as many
    sequences as have its tokens."""
    patience: AtLeast0 = 0
    """Stop after so many evaluations in a row without a new lowest loss; 0: never."""
    samples: AtLeast0 = 0
    """Prompts of the first so many examples that are answered at each evaluation, and logged."""
    sample_tokens: AtLeast1 = 64
    """Longest answer, in tokens."""

    @property
    def on(self) -> bool:
        """There is something to evaluate on."""
        return bool(self.path or self.split or self.held_out)

    @property
    def held_out(self) -> float:
        """`share` as a number: 0 as long as it is auto, until `pipeline.settle_evaluation`."""
        return 0.0 if self.share == "auto" else self.share

    @property
    def interval(self) -> int:
        """`every` as a number: 0 as long as it is auto, until `pipeline.settle_evaluation`."""
        return 0 if self.every == "auto" else self.every

    def data(self, trained: Data) -> Data:
        """Return the evaluation's own file or split as data that are read as those of the training are."""
        # A packed row would mix documents in one loss; padding is left out of the loss anyway.
        data = msgspec.structs.replace(trained, packing=False, limit=0, files=[])
        if self.path:
            return msgspec.structs.replace(data, path=self.path, name="", subset="")
        return msgspec.structs.replace(data, split=self.split)


class Checkpoint(Section, frozen=True):
    """Checkpoints that a run resumes from; the final model is written as well."""

    every: AtLeast0 = 0
    """Steps between checkpoints; 0: by time (`minutes`). A stop and a best evaluation (`keep_best`) write one too."""
    minutes: NotNegative = 20.0
    """Minutes between checkpoints where `every` is 0; 0: none by time."""
    keep: AtLeast1 = 2
    """How many to keep; older ones are removed when a new one is complete, and before it if the disk is short."""
    keep_best: bool = True
    """Write one after each evaluation with a new lowest loss, and keep the best, where there are evaluations."""
    at_end: bool = False
    """Write one at the end of training too."""
    background: bool = True
    """Write from a copy in host memory while training continues, where that memory is free."""
    rehearse: bool = True
    """In the rehearsal (`training.rehearsal`), check the disk's space for all that will be written, and write and read
    back a sample of each file of a checkpoint."""
    resume: str = "auto"
    """auto: from the newest in `output.dir` where there is one, of the same configuration (another one is refused);
    never; or the path of a checkpoint or output folder, whose settings may differ."""
    allow: list[Change] = msgspec.field(default_factory=list[Change])
    """Differences from the checkpoint to accept although the run then differs from an uninterrupted one: seed,
    data, sequence_length, micro_batch, grad_accumulation, ranks."""


class Output(Section, frozen=True):
    """Where results go."""

    dir: str = ""
    """Output folder: `checkpoints/` and the final `model/` lie in it; empty: `output/` in the run directory."""
    overwrite: bool = False
    """Begin anew in an output folder that already holds checkpoints or a model."""
    save_model: bool = True
    """Write the final model, in the form that AutoModelForCausalLM.from_pretrained loads."""
    load_best: bool = True
    """Make it of the weights with the lowest evaluation loss, from their checkpoint (`checkpoint.keep_best`), where
    there are evaluations; false: of the last step's."""
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


class Monitor(Section, frozen=True):
    """Where else the run can be seen while it trains; an option of the command line replaces its setting."""

    metrics: str = ""
    """As `--metrics`: [HOST:]PORT to serve figures to Prometheus, or FILE.prom for node_exporter; empty: neither."""
    report_to: Annotated[list[str], _COMMAS] = msgspec.field(default_factory=list[str])
    """As `--report-to`: systems that the run is sent to, of otel, wandb, trackio, tensorboard and mlflow; a list, or
    one text with commas."""


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
    monitor: Monitor = msgspec.field(default_factory=Monitor)
    debug: Debug = msgspec.field(default_factory=Debug)
    deepspeed: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    """Any other keys of DeepSpeed's own configuration, applied on top of the sections above."""
