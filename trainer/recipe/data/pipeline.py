"""Makes training rows of records: encoded once, kept on disk, packed or not.

Data that do not fit the configuration raise ``ConfigError``.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy
import torch
from huggingface_hub.constants import HF_HOME
from numpy.typing import NDArray

from ....protocol.errors import ConfigError, FtmonError, UsageError
from ....protocol.host.process import start_ticks
from .. import hardware
from ..config.schema import Config
from ..config.write import dump
from ..distributed import World
from ..model import tokenizer as tokenizers
from ..model.loss import IGNORED
from ..monitor import activity
from ..support import settle_batch
from . import messages
from .encode import Documents, Encoder, Report, join_parts, opened, publish, scratch, texts, write_part
from .records import Records, read_records


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Distribute documents over bins, longest first, each into the fullest bin with room for it.

    Best-fit decreasing uses at most 11/9 of the fewest bins possible, plus 4 (Johnson, 1973). Return the numbers of the
    documents in each bin.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit r is set while a bin has r tokens of room: the lowest set bit at or above a length is its best fit.
    rooms = 0
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[document]
        if length > capacity:
            raise ValueError(f"document {document} has {length} tokens, more than a bin's {capacity}")
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room = capacity
            chosen = len(bins)
            bins.append([])
        bins[chosen].append(document)
        left = room - length
        if left:
            with_room[left].append(chosen)
            rooms |= 1 << left
    return bins


_LETTERS_ALONE = 50_000_000
"""Text that one process encodes, its tokenizer on all cores, in about the time of another process's imports: 10 s."""
_LETTERS_OF_A_PROCESS = 5_000_000
_SAMPLED = 32
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Examples:
    """Encoded examples, and their counts."""

    rows: Any  # A sequence of mappings with ``input_ids``, ``labels`` and, if packed, the ``lengths`` of its documents
    tokens: NDArray[numpy.int64]
    label_tokens: NDArray[numpy.int64]
    """Tokens of each row that carry loss: labels after a document's first position, which nothing predicts."""
    read: int
    key: str = ""  # Identifier of the content: equal for equal token ids and labels in equal order, from any files
    report: Report = field(default_factory=Report)

    def select(self, rows: Sequence[int]) -> "Examples":
        """Return some of the rows, in the order given; their key has their number."""
        chosen = numpy.asarray(rows, numpy.int64)
        tokens, labels = self.tokens[chosen], self.label_tokens[chosen]
        return replace(
            self, rows=self.rows.select(rows), tokens=tokens, label_tokens=labels, key=f"{self.key}-{len(rows)}"
        )


class Rows:
    """Rows of one document each, or of several packed ones."""

    def __init__(self, documents: Documents, rows: list[list[int]], packed: bool) -> None:
        self._documents = documents
        self._rows = rows
        self.packed = packed

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a row's ``input_ids`` and ``labels`` as arrays of int64; packed, the ``lengths`` of its documents."""
        found = [self._documents.document(document) for document in self._rows[index]]
        ids = numpy.concatenate([ids for ids, _ in found]).astype(numpy.int64)
        learned = numpy.concatenate([learned for _, learned in found])
        result: dict[str, Any] = {"input_ids": ids, "labels": numpy.where(learned, ids, IGNORED)}
        if self.packed:
            result["lengths"] = [len(ids) for ids, _ in found]
        return result

    def document_lengths(self) -> Iterator[list[int]]:
        """Yield the tokens of each document, row by row."""
        for row in self._rows:
            yield self._documents.lengths[row].tolist()

    def select(self, rows: Sequence[int]) -> "Rows":
        """Return some of the rows, in the order given."""
        return Rows(self._documents, [self._rows[row] for row in rows], self.packed)

    def records(self, index: int) -> list[int]:
        """Return the numbers of the records in a row."""
        return [int(self._documents.records[document]) for document in self._rows[index]]


def record_formats(records: Records, config: Config) -> list[str]:
    """Return the format of each source's records."""
    found: list[str] = []
    for number in range(len(records.sources)):
        first = records.first(number)
        try:
            if first is None:
                # Each record is refused as it is read, with its place and reason.
                found.append("text" if config.data.format == "auto" else config.data.format)
            else:
                found.append(messages.detect(first, config.data))
        except UsageError as error:
            raise ConfigError(str(error)) from None
    return found


def load_tokenizer(config: Config, records: Records, forms: list[str], trained: Path | None = None) -> Any:
    """Return the tokenizer: the configured one, the one trained before, or one trained on these records now."""
    made = tokenizers.load(config, trained)
    if made is not None:
        return made
    made = tokenizers.train(
        lambda: (
            text for number, record in records for text in texts(record, forms[records.source_of(number)[0]], config)
        ),
        config.tokenizer.vocab_size,
    )
    return tokenizers.with_special_tokens(made, config)


def encode(
    records: Records,
    encoder: Encoder,
    tokenizer: Any,
    config: Config,
    log: Any = None,
    progress: Callable[[int], object] | None = None,
) -> Path:
    """Encode all records unless an earlier run's documents are on disk; return the folder of the documents.

    ``progress`` is called often, with the number of finished records.
    """
    folder = cache_folder() / tokens_key(records, encoder, tokenizer)
    documents = opened(folder)
    if documents is None:
        made = scratch(folder)
        try:
            processes = _processes(records, config)
            if processes > 1:
                if log is not None:
                    log(f"tokenizing {len(records):,} records with {processes} processes")
                _encode_parts(records, encoder, config, tokenizer, made, processes, progress)
            else:
                with _on_all_cores():
                    write_part(encoder, records, 0, len(records), made, progress)
            publish(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)  # gigabytes, if it was not renamed to the folder
        documents = Documents(folder)
    documents.report.check(config.data.max_refused)
    return folder


def examples(folder: Path, records: Records | None, config: Config) -> Examples:
    """Return the training rows of encoded documents, without those that ``evaluation.share`` sets aside.

    ``records`` give the files' weights; None: all are 1. If ``data.packing`` is ``auto``, they are not packed if packed
    ones would not fill a step.
    """
    documents = Documents(folder)
    trained = _weighted(documents, numpy.flatnonzero(~_set_aside(documents, config)), records, config)
    found = _examples(documents, trained, config, bool(config.data.packing))
    if config.data.packing == "auto" and len(found.rows) < rows_a_step(config, len(found.rows)):
        return _examples(documents, trained, config, packing=False)
    return found


def rows_a_step(config: Config, rows: int) -> int:
    """Return the rows that one optimizer step takes over all ranks, of an epoch of ``rows``."""
    training = settle_batch(config, rows).training
    data_ranks = max(1, config.run.ranks // training.sequence_parallel_size)
    return training.micro_batch * training.micro_steps * data_ranks


def held_out(folder: Path, config: Config) -> Examples:
    """Return the rows that ``evaluation.share`` sets aside: each document once, regardless of weights, not packed."""
    documents = Documents(folder)
    return _examples(documents, numpy.flatnonzero(_set_aside(documents, config)), config, packing=False)


_LEAST_RECORDS = 1_000  # Records of which some are held out by default: 20, for losses that mean something
_HELD_OUT = 0.02
_LEAST_EXAMPLES = 20
_EVALUATIONS = 10


def settle_share(config: Config, documents: Documents) -> Config:
    """Return a configuration whose ``evaluation.share`` is a number: by default a share of large data."""
    settings = config.evaluation
    if settings.share != "auto":
        return config
    asked = settings.interval or settings.patience or settings.samples
    large = asked or len(numpy.unique(documents.records)) >= _LEAST_RECORDS
    share = _HELD_OUT if large and not (settings.path or settings.split) else 0.0
    return msgspec.structs.replace(config, evaluation=msgspec.structs.replace(settings, share=share))


def settle_evaluation(config: Config, folder: Path, total: int) -> Config:
    """Return a configuration whose ``evaluation.share`` and ``every`` are numbers, for ``total`` steps."""
    settled = settle_share(config, Documents(folder))
    if settled.evaluation.every != "auto":
        return settled
    every = -(-total // _EVALUATIONS) if settled.evaluation.on else 0
    return msgspec.structs.replace(settled, evaluation=msgspec.structs.replace(settled.evaluation, every=every))


def evaluated(config: Config, examples: Examples, epochs: float) -> Examples:
    """Return the held-out examples to evaluate on, of an unsettled configuration.

    Evaluations of a share that nobody has chosen cost ten times that share of the trained examples, so of less than an
    epoch it takes a part of them, spread over the data.
    """
    count = len(examples.rows)
    if config.evaluation.share != "auto" or config.evaluation.limit or epochs >= 1:
        return examples.select(range(min(config.evaluation.limit or count, count)))
    wanted = min(count, max(_LEAST_EXAMPLES, math.ceil(count * epochs)))
    return examples.select([number * count // wanted for number in range(wanted)])


def _set_aside(documents: Documents, config: Config) -> NDArray[numpy.bool_]:
    """Return a mask of the documents to evaluate on: whole records, drawn before weights repeat them."""
    share = settle_share(config, documents).evaluation.held_out
    if not share:
        return numpy.zeros(len(documents), bool)
    records = numpy.unique(documents.records)
    count = max(1, round(share * len(records)))
    if count >= len(records):
        raise ConfigError(f"evaluation.share: {len(records)} records cannot be split into training and evaluation")
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(config.training.seed)).numpy()
    return numpy.isin(documents.records, records[order[:count]])


def _examples(documents: Documents, used: NDArray[numpy.int64], config: Config, packing: bool) -> Examples:
    if not len(used):
        raise ConfigError(
            "data: no record holds a token to learn within training.sequence_length; 'ftmon data check' shows why"
        )
    labels = documents.label_tokens()
    chosen = used.tolist()
    if packing:
        lengths = documents.lengths[used].tolist()
        rows = [[chosen[index] for index in row] for row in best_fit(lengths, config.training.sequence_length)]
    else:
        rows = [[document] for document in chosen]
    ends = numpy.cumsum([len(row) for row in rows])
    flat = numpy.concatenate([numpy.asarray(row) for row in rows])

    def summed(values: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
        sums = numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(values[flat])])
        return numpy.diff(sums[numpy.concatenate([[0], ends])])

    content = hashlib.blake2b(documents.digest.encode() + flat.tobytes() + ends.tobytes(), digest_size=8)
    return Examples(
        Rows(documents, rows, packing),
        summed(documents.lengths),
        summed(labels),
        documents.report.read,
        content.hexdigest(),
        documents.report,
    )


def tokens_key(records: Records, encoder: Encoder, tokenizer: Any) -> str:
    """Return a hash of everything that documents depend on."""
    versions = [metadata.version(name) for name in ("transformers", "tokenizers")]
    parts = (records.digest, tokenizers.fingerprint(tokenizer), encoder.settings, versions)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def cache_folder() -> Path:
    """Return the folder of encoded documents, in the cache of ``datasets``, whose import would take a second."""
    place = os.environ.get("HF_DATASETS_CACHE") or os.path.join(HF_HOME, "datasets")
    return Path(place) / "ftmon-tokens"


def _weighted(
    documents: Documents, trained: NDArray[numpy.int64], records: Records | None, config: Config
) -> NDArray[numpy.int64]:
    """Return the documents of an epoch, each as often as its file's weight; a fraction is drawn with the seed."""
    if records is None or all(source.weight == 1 for source in records.sources):
        return trained
    chosen: list[NDArray[numpy.int64]] = []
    sources = numpy.array([records.source_of(int(record))[0] for record in documents.records[trained]], numpy.int64)
    for number, source in enumerate(records.sources):
        own = trained[sources == number]
        # By record, so that all pieces of a split text are used equally often.
        of = numpy.unique(documents.records[own])
        generator = numpy.random.default_rng([config.training.seed, number])
        times = numpy.full(len(of), int(source.weight))
        rest = round(len(of) * (source.weight - int(source.weight)))
        times[generator.permutation(len(of))[:rest]] += 1
        chosen.append(numpy.repeat(own, times[numpy.searchsorted(of, documents.records[own])]))
    return numpy.concatenate(chosen)


def _processes(records: Records, config: Config) -> int:
    if config.data.processes:
        return min(config.data.processes, len(records))
    letters = _letters(records)
    return min(hardware.cores(), letters // _LETTERS_OF_A_PROCESS) if letters >= _LETTERS_ALONE else 1


@contextlib.contextmanager
def _on_all_cores() -> Generator[None]:
    """Let tokenizers use all cores in the body, which they may not where processes are forked later."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before or "false"


def _letters(records: Records) -> int:
    """Return the approximate length of all records, from some of them."""
    if len(records) < _SAMPLED:
        return 0
    apart = len(records) // _SAMPLED
    return apart * sum(len(str(record)) for _, record in records.some(range(0, apart * _SAMPLED, apart)))


def _encode_parts(
    records: Records,
    encoder: Encoder,
    config: Config,
    tokenizer: Any,
    folder: Path,
    processes: int,
    progress: Callable[[int], object] | None,
) -> None:
    """Encode consecutive parts of the records in separate processes, and join their results.

    Processes are spawned: a fork would copy the locks of this one's threads (CUDA, gloo, the probe).
    """
    (folder / "config.yaml").write_text(dump(config))
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    bounds = [len(records) * part // processes for part in range(processes + 1)]
    parts = [folder / f"part-{part}" for part in range(processes)]
    common = {"key": tokens_key(records, encoder, tokenizer), "parent": os.getpid()}
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("FTMON_") and name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running: list[subprocess.Popen[bytes]] = []
    try:
        for part, start, stop in zip(parts, bounds, bounds[1:], strict=False):
            job = {**common, "folder": str(folder), "part": str(part), "start": start, "stop": stop}
            command = [sys.executable, "-P", "-m", f"{__package__}.encode_part", json.dumps(job)]
            with part.with_suffix(".log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
                    )
                )
        _import_ahead(config)
        for process, part in zip(running, parts, strict=True):
            while process.poll() is None:
                if any(other.returncode for other in running):
                    break
                if progress is not None:
                    progress(sum(map(_done, parts)))
                time.sleep(_POLL_SECONDS)
            if process.poll():
                words = part.with_suffix(".log").read_text(errors="replace").strip().splitlines()
                raise FtmonError(f"data: tokenizing failed: {words[-1] if words else f'status {process.returncode}'}")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
            process.wait()
    join_parts(parts, folder)
    for part in parts:
        part.with_suffix(".log").unlink()
        part.with_suffix(".done").unlink(missing_ok=True)


def _import_ahead(config: Config) -> None:
    """Import what the rank needs later, while other processes encode."""
    compiles = config.model.compile == "layers" or (config.model.compile == "auto" and config.run.device != "cpu")
    for needed, module in ((compiles, "torch._inductor.compile_fx"), (config.lora.rank > 0, "peft")):
        if needed:
            with contextlib.suppress(ImportError):
                importlib.import_module(module)


def _done(part: Path) -> int:
    try:
        return int(part.with_suffix(".done").read_text() or 0)
    except OSError:
        return 0


class Status(msgspec.Struct):
    """Result of rank 0: the documents' folder, or the error."""

    folder: str = ""
    error: str = ""


def leave(path: Path, status: Status) -> None:
    """Write the result of rank 0 atomically."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.encode(status))
    os.replace(unfinished, path)


def wait(path: Path, first: int) -> Status:
    """Wait for the result of rank 0, the process ``first``, as long as it lives; return it."""
    while True:
        alive = start_ticks(first) is not None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Status)
        except FileNotFoundError:
            if not alive:
                return Status(error="rank 0 ended while it prepared the data")
        time.sleep(2 * _POLL_SECONDS)


def prepare(config: Config, world: World, output: Path, resumed: Path | None) -> tuple[Any, Path, Examples]:
    """Return the tokenizer, the folder of the encoded documents, and the examples to train on. All ranks call this."""
    kept = output / "tokenizer"
    trained = resumed.parent.parent / "tokenizer" if resumed else None
    made: Any = None

    def encode() -> Path:
        nonlocal made
        made, folder = _encode(config, trained, kept, world.log)
        return folder

    folder = first_encodes(world, encode)
    if made is None:
        made = tokenizers.load(config, kept)
    # Rank 0 has chosen the template, if there are chats.
    made.chat_template = json.loads(world.share_text(json.dumps(made.chat_template)))
    result = read_examples(folder, config)
    for line in result.report.notes():
        world.note(line)
    return made, folder, result


def read_examples(folder: Path, config: Config) -> Examples:
    """Return ``examples`` of encoded documents; records are read only if the weights of files differ."""
    with activity("data", "packing" if config.data.packing else "reading the tokens"):
        # Every rank would read and hash whole files.
        weighted = any(file.weight != 1 for file in config.data.files)
        return examples(folder, read_records(config) if weighted else None, config)


def first_encodes(world: World, encode: Callable[[], Path]) -> Path:
    """Return what ``encode`` returns in rank 0. All ranks call this.

    The others wait without a collective, so that no timeout ends a run with slow data.
    """
    place = cache_folder()
    status_file = Path(world.share_text(str(place / f"prepared-{secrets.token_hex(8)}")))
    first = int(world.share_text(str(os.getpid())))
    if world.is_first:
        place.mkdir(parents=True, exist_ok=True)
        status = Status(error="rank 0 failed while it prepared the data")
        try:
            folder = encode()
            status = Status(str(folder))
        except FtmonError as error:
            status = Status(error=str(error))
            raise
        finally:
            leave(status_file, status)
    else:
        status = wait(status_file, first)
    world.barrier()
    if world.is_first:
        status_file.unlink(missing_ok=True)
    if status.error:
        raise ConfigError(status.error)
    return Path(status.folder)


def _encode(config: Config, trained: Path | None, keep: Path, say: Any) -> tuple[Any, Path]:
    records = read_records(config)
    forms = record_formats(records, config)
    with activity("data", "the tokenizer"):
        made = load_tokenizer(config, records, forms, trained)
    encoder = Encoder(made, config, forms)
    if not (config.tokenizer.name or config.model.name):
        made.save_pretrained(str(keep))
    with activity("data", "tokenizing", total=len(records)) as progress:
        return made, encode(records, encoder, made, config, say, progress.report)
