"""A dry run of ``ftmon train``: the recipe's own model, engine, optimizer and step, from its configuration.

Import it after DeepSpeed has its CUDA accelerator, and outside fake tensors, as modules make tensors at import.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.host.machine import Gpu, causal_pairs
from ..recipe.config.load import Loaded, load
from ..recipe.config.schema import Config
from ..recipe.data.batches import Collate
from ..recipe.distributed import World
from ..recipe.engine import LateStep, make_engine
from ..recipe.model import loss as fused
from ..recipe.model import tokenizer
from ..recipe.model.cross_entropy import linear_cross_entropy
from ..recipe.model.load import count_parameters
from ..recipe.model.loss import Batch
from ..recipe.model.shape import beyond, named_config
from ..recipe.optim.adamw import SmallStateAdamW
from ..recipe.preflight import resolve
from ..recipe.preflight.consistency import settle_compile
from ..recipe.preflight.resolve import check_hub
from ..recipe.step import Stepper, make_collate
from ..recipe.support import in_bf16_optimizer
from . import fake
from .deepspeed_file import KEEPS_GATHERED, LIVE_PARAMETERS
from .dry import DryRun, Job
from .record import END

Mark = Callable[[str], None]  # Called with the name of a phase
_GPUS_OF_A_HOST = 8


class DryWorld(World):
    """A world of one rank, whose agreements need no other ranks."""

    has_values = False

    def __init__(self, ranks: int, rank: int) -> None:
        self.rank = rank
        self.local_rank = 0
        self.size = ranks
        self.local_size = min(ranks, _GPUS_OF_A_HOST)
        self.on_gpu = True
        self.device = torch.device("cuda", 0)
        self.host_group = None
        self.logged: list[str] = []  # Notes that the recipe would print

    def log(self, text: str) -> None:
        """Print nothing: the output is the prediction's."""

    def note(self, text: str) -> None:
        """Keep a line, except those of timers, which are about slow machines."""
        if threading.current_thread() is threading.main_thread():
            self.logged.append(text)

    def barrier(self) -> None:
        """Do nothing."""

    leave = barrier

    def share_text(self, text: str) -> str:
        """Return the text."""
        return text

    first_text = share_text

    def all_agree(self, mine: bool) -> bool:
        """Return ``mine``."""
        return mine


class Tokens:
    """The attributes of a tokenizer that the recipe reads to make a model."""

    pad_token_id = eos_token_id = bos_token_id = 0

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


def tokens_of(config: Config) -> tuple[Any, str]:
    """Return the part of a tokenizer that determines the model's shape, and an assumption (or empty).

    Raises ``ConfigError``: ``tokenizer.name`` cannot be loaded.
    """
    if config.model.name or "vocab_size" in config.model.config:
        return Tokens(0), ""
    if config.tokenizer.name:
        return tokenizer.load(config, None), ""
    size = config.tokenizer.vocab_size
    return Tokens(size), f"the tokenizer is trained on the data: {size:,} tokens assumed (tokenizer.vocab_size)"


class DryStep:
    """The engine that ``ftmon train`` makes, and its step."""

    def __init__(self, config: Config, world: DryWorld, tokens: Any, begin: Mark, end: Mark, update: Any) -> None:
        """Make the engine, under fake tensors. ``update`` receives the tensors that a compiled optimizer updates.

        Raises ``ConfigError`` if the recipe, transformers or peft refuse the configuration.
        """
        world.share_sequences(config.training.sequence_parallel_size)
        self._micro_steps = config.training.micro_steps
        run = msgspec.structs.replace(config.training, grad_accumulation=min(3, self._micro_steps))
        config = msgspec.structs.replace(config, training=run)
        engine, self.model = make_engine(config, world, tokens, 1 << 30, without_weights=fake.hold_in_4_bits)
        made = engine.basic_optimizer
        if isinstance(made, SmallStateAdamW) and made.compiled_update is not None:
            between = 3 if config.optimizer.kind == "adamw_8bit" else 0
            made.compiled_update = partial(_update, update, between)
        fused_loss = fused.set_up(self.model, config, world)
        self.parameters = count_parameters(self.model)
        trained = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        self.trainable = sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in trained)
        self._padding = Collate(tokens.pad_token_id, config.training.sequence_length)
        self._collate = make_collate(self.model, config, world, self._padding, fused_loss)
        self._packed = config.data.packing
        self._micro_batch = config.training.micro_batch
        engine.train()
        self.engine = engine
        self._stepper = Stepper(config, world, _Observed(engine, begin, end))

    def batch(self, documents: list[int]) -> Batch:
        """Return a micro-batch of equal rows in which all tokens carry loss; call it outside fake tensors.

        It corresponds to a run whose ``training.sequence_length`` is the length of a row, the tokens of ``documents``
        together; without packing there is one document.
        """
        self._padding.limit = length = sum(documents)
        ids = torch.zeros(length, dtype=torch.long).numpy()
        row = {"input_ids": ids, "labels": ids, "lengths": documents}
        if not self._packed:
            del row["lengths"]
        return self._collate([row] * self._micro_batch)

    def update(self) -> None:
        """Run the update of another step after one, without its passes."""
        self.engine.micro_steps += min(3, self._micro_steps) - 1
        self._stepper.engine.step()

    def train_step(self, batch: Batch, times: Callable[[int], None]) -> None:
        """Run an optimizer step on copies of one micro-batch; of each micro-step ``times`` is called with its weight.

        Between the first and the last, which differ, one stands for all.
        """
        middle = max(0, self._micro_steps - 2)
        weights = [1, *([middle] if middle else []), 1][: self._micro_steps]

        def fetch(weight: int) -> Batch:
            times(weight)
            return dict(batch)

        self._stepper.train_step([partial(fetch, weight) for weight in weights], batch["labels"].numel())


def _update(update: Any, between: int, parameter: Any, *others: Any) -> None:
    """Update a piece in place: one kernel, or several with ``between`` fp32 tensors between them.

    8-bit states need three such tensors, as the first kernel computes their scales (measured on an H200, torch 2.11).
    """
    torch.empty(between * parameter.numel(), dtype=torch.float32, device=parameter.device)
    update((parameter, *others))


class _Observed:
    """An engine that reports the start and end of its phases."""

    def __init__(self, engine: Any, begin: Mark, end: Mark) -> None:
        self._engine = engine
        self._begin = begin
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, **batch: Any) -> Any:
        return self._in("forward", self._engine, **batch)

    def backward(self, loss: Any, **named: Any) -> None:
        self._in("backward", self._engine.backward, loss, **named)

    def step(self) -> None:
        self._in("optimizer", self._engine.step)

    def _in(self, phase: str, call: Any, *inputs: Any, **named: Any) -> Any:
        self._begin(phase)
        result = call(*inputs, **named)
        self._end(phase)
        return result


class Documents(NamedTuple):
    """Documents of packed rows."""

    pairs_a_token: float  # Pairs of query and key under the causal mask, per token: the mean over all rows
    longest: int  # Tokens of the longest document
    densest: list[int]  # Tokens of each document in the row with most documents

    def pairs(self, length: int) -> float:
        """Return the pairs per token in rows of ``length`` tokens, which have no longer document."""
        return min(self.pairs_a_token, causal_pairs([length]) / length)

    def row(self, length: int) -> list[int]:
        """Return the documents of a row of ``length`` tokens, packed as densely as the densest row."""
        found: list[int] = []
        for tokens in cycle(self.densest):
            if length <= 0:
                break
            found.append(min(tokens, length))
            length -= tokens
        return found


def of_rows(rows: Iterable[list[int]]) -> Documents:
    """Return the documents of at least one packed row, each given by the tokens of its documents."""
    pairs = tokens = longest = 0
    densest: list[int] = []
    for row in rows:
        pairs += causal_pairs(row)
        tokens += sum(row)
        longest = max(longest, *row)
        densest = max(densest, row, key=len)
    return Documents(pairs / tokens, longest, densest)


def of_sample(pairs_a_token: float) -> Documents:
    """Return documents whose mean is known from a sample, which has not the densest row: memory is of one a row."""
    return Documents(pairs_a_token, _ANY, [_ANY])


_ANY = 1 << 40  # Tokens of a document that is longer than any row


_UNSUPPORTED = {
    "run.device=cpu": "is cpu; a prediction is of a run on GPUs",
    "model.attention=flash_attention_2": "cannot be predicted: its kernels do not run on fake tensors; use auto, whose "
    "memory is the same",
}
"""Reasons by setting."""


def read(
    source: str, overrides: Sequence[str], ranks: int | None, lengths: Sequence[int], *, data: bool = False
) -> Config:
    """Return the resolved configuration of a run on GPUs, as ``ftmon train`` resolves it.

    ``source`` is the file, or without one the first ``key=value``; ``ranks`` and ``lengths`` replace ``run.ranks`` and
    ``training.sequence_length`` (by the longest); ``data``: the data set will be read. Raises ``UsageError`` if a
    setting is invalid or cannot be predicted; the text names the place and the dotted path.
    """
    given = [*overrides, *([f"run.ranks={ranks}"] if ranks else [])]
    loaded = load(source, given)
    _refuse(loaded)
    check_hub(loaded, data=data)
    config = resolve.resolve(loaded, elsewhere=loaded.config.run.ranks or 1).config
    longest = max(lengths, default=config.training.sequence_length)
    return msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, sequence_length=longest))


def _refuse(loaded: Loaded) -> None:
    for setting, text in _UNSUPPORTED.items():
        path, _, value = setting.partition("=")
        if attrgetter(path)(loaded.config) == value:
            raise loaded.error(path, text)
    if loaded.config.model.activation_offload != "none":
        raise loaded.error("model.activation_offload", "cannot be predicted; use none")


class RecipeRun(DryRun):
    """A dry run of the recipe; only one per process."""

    def __init__(
        self,
        config: Config,
        allocator: Settings,
        gpu: Gpu,
        documents: Documents | None,
        rank: int = 0,
        label_share: float = 1.0,
    ) -> None:
        """Make the model and the engine; without ``documents``, each packed row is one document.

        ``label_share``: of the data set's tokens, those that carry loss. The time is that of such micro-batches; memory
        is that of one in which every token carries loss, as at the ends of the longest rows (``recipe/rehearse.py``).
        Raises ``ConfigError`` if the recipe or a library refuses the configuration.
        """
        self.notes: list[str] = []  # Assumptions, and the recipe's messages about this model
        self._config = config = settle_compile(config, True, self.notes.append)
        self._compiles = config.model.compile != "off"
        self._documents = documents
        self._label_share = label_share
        self._before_update: tuple[int, Any] = 0, None  # Events before the last update, and what was counted before it
        training = config.training
        job = Job(
            shape=None,
            deepspeed={},
            ranks=config.run.ranks,
            micro_batch=training.micro_batch,
            accumulation=training.micro_steps,
            allocator=allocator,
            gpu=gpu,
            sequence_parallel_size=training.sequence_parallel_size,
        )
        super().__init__(job, rank)

    def _make(self) -> None:
        config = self._config
        with fake.left():
            from transformers import masking_utils

            tokens, assumed = tokens_of(config)
        if config.data.packing:
            masks: Any = masking_utils
            masks.find_packed_sequence_indices = fake.find_packed_sequence_indices
        world = DryWorld(self.job.ranks, self._rank)
        context: Any = nullcontext()
        if self._compiles:
            from . import compiled

            why = "decoder layers are predicted uncompiled, which takes more memory and time"
            with fake.left():
                context = compiled.compiling(self._recorder, lambda text: self.notes.append(f"{why}: {text}"))
        self._counting.label_share = self._label_share
        loss_module: Any = fused
        loss_module.linear_cross_entropy = self._counting.over_labels()(linear_cross_entropy)
        with context:
            self._dry = DryStep(config, world, tokens, self._begin, self._note, self._counting.update)
        self.parameters = self._dry.parameters
        self.trainable = self._dry.trainable
        self.engine = self._dry.engine
        # Passes leave nothing in BF16_Optimizer, whose sums of gradients are made with it, and ``LateStep`` does not
        # ask which of them were written. Only the first step compiles.
        late = in_bf16_optimizer(config, self.job.ranks) and LateStep.fits(self.engine.optimizer)
        self._updates_alone = late and not self._compiles
        self.notes = [*self.notes, *([assumed] if assumed else []), *world.logged]
        if note := beyond(self._dry.model.config, config.training.sequence_length):
            self.notes.append(note)
        sharing = config.training.sequence_parallel_size
        if sharing > 1:
            self.notes.append(
                f"{sharing} ranks share each sequence: lengths are of whole rows, memory of a rank's slice"
            )
        labels = _labels(self._label_share)
        if config.data.packing:
            self.notes.append(_packed(self._documents, labels))
        else:
            mask = ", and attention takes a mask" if sharing == 1 else ""
            self.notes.append(f"every row has the full length, {labels}{mask}")
        if config.optimizer.kind == "muon":
            self.notes.append("Muon's update is run uncompiled: a compiled one takes less memory")

    def _step(self, length: int) -> None:
        for name in ("forward", "backward", "optimizer"):
            self._phases.pop(name, None)
        with fake.left():
            batch = self._dry.batch([length] if self._documents is None else self._documents.row(length))
        self._counting.pairs_a_token = self._documents and self._documents.pairs(length)
        self._dry.train_step(batch, self._counting.begin_micro_step)

    def _begin(self, phase: str) -> None:
        if phase == "optimizer":
            self._before_update = len(self.trace.events), self._counting.counted()
        super()._begin(phase)

    def _update_again(self, first: int) -> bool:
        begin, counted = self._before_update
        end = next(place for place, event in enumerate(self.trace.events[begin:], begin + 1) if event[0] == END)

        def update() -> None:
            self._counting.return_to(counted)
            self._dry.update()

        return self.trace.repeat_around(first, range(begin, end), update, self._recorder.stored())


_LEAST_LAYERS = 8


def repeats(config: Config) -> bool:
    """Return whether a run has many layers, which its configuration makes alike, and each has an equal part of a rank.

    Not if layers are recomputed: they fragment memory by a tenth, and few do in another way.
    """
    zero, model = config.deepspeed.get("zero_optimization", {}), config.model
    equal = config.zero.stage == 3 or in_bf16_optimizer(config, config.run.ranks)
    if not equal or model.gradient_checkpointing == "layers" or any(key in zero for key in KEEPS_GATHERED):
        return False
    if model.checkpoint_every > 1:
        return False
    shape = _shape(config)
    alike = len(set(getattr(shape, "layer_types", None) or [""])) == 1 and shape.get_text_config() is shape
    return alike and int(getattr(shape, "num_hidden_layers", 0) or 0) >= _LEAST_LAYERS


def make_shallow(
    config: Config,
    allocator: Settings,
    gpu: Gpu,
    documents: Documents | None,
    layers: int,
    rank: int,
    label_share: float = 1.0,
) -> RecipeRun:
    """Return a dry run with so many layers.

    If all layers have more parameters than ZeRO-3 keeps gathered, none are: it would keep those of a few layers. Raises
    ``ConfigError`` if the recipe or a library refuses the configuration.
    """
    few = _with_layers(config, layers)
    if config.zero.stage == 3 and _parameters(config) > LIVE_PARAMETERS:
        zero = {**config.deepspeed.get("zero_optimization", {}), **dict.fromkeys(KEEPS_GATHERED, 0)}
        few = msgspec.structs.replace(few, deepspeed=config.deepspeed | {"zero_optimization": zero})
    return RecipeRun(few, allocator, gpu, documents, rank, label_share)


def _with_layers(config: Config, layers: int) -> Config:
    shape = _shape(config)
    sizes: dict[str, Any] = {shape.attribute_map.get("num_hidden_layers", "num_hidden_layers"): layers}
    if kinds := getattr(shape, "layer_types", None):
        sizes["layer_types"] = list(kinds[:layers])
    of = "overrides" if config.model.name else "config"
    model = msgspec.structs.replace(config.model, **{of: {**getattr(config.model, of), **sizes}})
    return msgspec.structs.replace(config, model=model)


def _parameters(config: Config) -> int:
    """Return the parameters of a model with equal layers, from those of one layer and of two."""
    from transformers import AutoModelForCausalLM

    counts: list[int] = []
    with torch.device("meta"):
        for layers in (1, 2):
            model: Any = AutoModelForCausalLM.from_config(_shape(_with_layers(config, layers)))
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
    return counts[1] + (int(_shape(config).num_hidden_layers) - 2) * (counts[1] - counts[0])


def _shape(config: Config) -> Any:
    from transformers import AutoConfig

    return named_config(config.model) if config.model.name else AutoConfig.for_model(**config.model.config)


def _packed(documents: Documents | None, labels: str) -> str:
    if documents is None:
        return f"each packed row is one document, and {labels}: shorter ones take less time (--data)"
    if documents.densest == [_ANY]:
        return f"packed rows take the time of documents as in a sample of the data; {labels}"
    return f"up to {len(documents.densest):,} documents in a packed row, as in the data set; {labels}"


def _labels(share: float) -> str:
    if round(share, 2) == 1:  # nothing predicts the first token of a text
        return "every token carries loss"
    return f"{share:.0%} of the tokens carry loss (memory as if all did)"
