"""A dry run of ``ftmon train``: the recipe's own model, engine, optimizer and step, from its configuration."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.analysis.allocator.settings import Settings
from ...protocol.host.gpus import Gpu
from ..recipe.config.load import Loaded, load
from ..recipe.config.schema import Config
from ..recipe.model.positions import beyond
from ..recipe.preflight import resolve
from ..recipe.preflight.inputs import check_hub
from . import fake_tensors
from .documents import Documents
from .dry import DryRun, Job

_UNSUPPORTED = {
    "run.device": ("cpu", "is cpu; a prediction is of a run on GPUs"),
    "model.compile": (
        "layers",
        "cannot be predicted: compiled code does not run on fake tensors; use off, whose memory is higher",
    ),
    "model.attention": (
        "flash_attention_2",
        "cannot be predicted: its kernels do not run on fake tensors; use auto, whose memory is the same",
    ),
}
"""Settings by path: the unsupported value, and the reason."""


def read(
    source: str, overrides: Sequence[str], ranks: int | None, lengths: Sequence[int], *, data: bool = False
) -> Config:
    """Return the resolved configuration of a run on GPUs, as ``ftmon train`` resolves it.

    Args:
        source: the file, or without one the first ``key=value``.
        overrides: assignments that override the file's.
        ranks: number of GPUs; None: ``run.ranks``, or 1.
        lengths: the requested sequence lengths; empty: ``training.sequence_length``.
        data: whether the data set will be read.

    Raises:
        UsageError: a setting is invalid or cannot be predicted; the text names the place and the dotted path.
    """
    given = [*overrides, *([f"run.ranks={ranks}"] if ranks else [])]
    without_file = "=" in source and not Path(source).exists()
    loaded = load(None, [source, *given]) if without_file else load(source, given)
    _refuse(loaded)
    check_hub(loaded, data=data)
    config = resolve.resolve(loaded, elsewhere=loaded.config.run.ranks or 1).config
    longest = max(lengths, default=config.training.sequence_length)
    return msgspec.structs.replace(config, training=msgspec.structs.replace(config.training, sequence_length=longest))


def _refuse(loaded: Loaded) -> None:
    for path, (value, text) in _UNSUPPORTED.items():
        section, _, name = path.partition(".")
        if getattr(getattr(loaded.config, section), name) == value:
            raise loaded.error(path, text)
    if loaded.config.model.activation_offload != "none":
        raise loaded.error("model.activation_offload", "cannot be predicted; use none")


class RecipeRun(DryRun):
    """A dry run of the recipe; only one per process."""

    def __init__(
        self, config: Config, allocator: Settings, gpu: Gpu, documents: Documents | None, rank: int = 0
    ) -> None:
        """Make the model and the engine.

        Args:
            config: configuration of the run.
            allocator: settings of PyTorch's allocator.
            gpu: the kind of GPU.
            documents: documents of the data set's packed rows; None: each row is one document.
            rank: this process's rank.

        Raises:
            ConfigError: the recipe or a library refuses the configuration.
        """
        self.notes: list[str] = []
        """Assumptions, and the recipe's messages about this model."""
        self._config = config
        self._documents = documents
        training = config.training
        job = Job(
            shape=None,
            deepspeed={},
            ranks=config.run.ranks,
            micro_batch=training.micro_batch,
            accumulation=training.grad_accumulation,
            allocator=allocator,
            gpu=gpu,
            sequence_parallel_size=training.sequence_parallel_size,
        )
        super().__init__(job, rank)

    def _make(self) -> None:
        config = self._config
        with fake_tensors.left():
            from transformers import masking_utils

            from . import dry_recipe

            tokens, assumed = dry_recipe.tokens_of(config)
        if config.data.packing:
            masks: Any = masking_utils
            masks.find_packed_sequence_indices = fake_tensors.find_packed_sequence_indices
        world = dry_recipe.DryWorld(self.job.ranks, self._rank)
        self._dry = dry_recipe.DryStep(config, world, tokens, self._begin, self._note, self._counting.update)
        self.parameters = self._dry.parameters
        self.trainable = self._dry.trainable
        self.engine = self._dry.engine
        logged = [line.removeprefix("note: ") for line in world.logged]
        self.notes = [*([assumed] if assumed else []), *logged]
        if note := beyond(self._dry.model.config, config.training.sequence_length):
            self.notes.append(note)
        sharing = config.training.sequence_parallel_size
        if sharing > 1:
            self.notes.append(
                f"{sharing} ranks share each sequence: lengths are of whole rows, memory of a rank's slice"
            )
        if config.data.packing:
            self.notes.append(_packed(self._documents))
        else:
            mask = ", and attention takes a mask" if sharing == 1 else ""
            self.notes.append(f"every row has the full length, every token carries loss{mask}")
        if config.optimizer.kind == "muon":
            self.notes.append("Muon's update is run uncompiled: a compiled one takes less memory")

    def _step(self, length: int) -> None:
        for name in ("forward", "backward", "optimizer"):
            self._phases.pop(name, None)
        with fake_tensors.left():
            batch = self._dry.batch([length] if self._documents is None else self._documents.row(length))
        self._counting.pairs_a_token = self._documents and self._documents.pairs(length)
        self._dry.train_step(batch)


def _packed(documents: Documents | None) -> str:
    if documents is None:
        return "each packed row is one document, and every token carries loss: shorter ones take less time (--data)"
    return f"up to {len(documents.densest):,} documents in a packed row, as in the data set; every token carries loss"
