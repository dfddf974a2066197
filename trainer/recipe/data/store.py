"""Stores documents on disk: token ids and labels in flat files, which every rank maps into memory."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy
from numpy.typing import NDArray

from .encode import Encoded, Encoder
from .messages import RefusedError
from .report import Report
from .sources import Records

BATCH = 256
"""Records encoded in one call of the tokenizer."""


class Documents:
    """Encoded documents of a folder."""

    def __init__(self, folder: Path) -> None:
        meta = msgspec.json.decode((folder / "meta.json").read_bytes(), type=Meta)
        self.report = meta.report
        self.digest = meta.digest
        """Hash of the documents' token ids and labels, in order."""
        self.lengths: NDArray[numpy.int64] = numpy.load(folder / "lengths.npy")
        self.records: NDArray[numpy.int64] = numpy.load(folder / "records.npy")
        """Record of each document."""
        self._starts = numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(self.lengths)])
        total = int(self._starts[-1])
        self.ids: Any = _mapped(folder / "ids.bin", numpy.int32, total)
        self.learned: Any = _mapped(folder / "learned.bin", numpy.bool_, total)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, index: int) -> tuple[NDArray[numpy.int32], NDArray[numpy.bool_]]:
        """Return a document's token ids, and a mask of those that carry loss; the first never does."""
        start, end = self._starts[index], self._starts[index + 1]
        learned = numpy.array(self.learned[start:end])
        learned[:1] = False
        return numpy.array(self.ids[start:end]), learned

    def label_tokens(self) -> NDArray[numpy.int64]:
        """Return the number of tokens that carry loss, by document."""
        counts = numpy.concatenate([numpy.zeros(1, numpy.int64), numpy.cumsum(self.learned, dtype=numpy.int64)])
        firsts = numpy.asarray(self.learned)[self._starts[:-1]] if len(self) else numpy.empty(0, numpy.int64)
        return counts[self._starts[1:]] - counts[self._starts[:-1]] - firsts


class Meta(msgspec.Struct):
    """Metadata of the tokens."""

    report: Report
    digest: str = ""


def _mapped(path: Path, dtype: Any, count: int) -> Any:
    if os.path.getsize(path) != count * numpy.dtype(dtype).itemsize:
        raise ValueError(f"{path} is damaged")
    return numpy.memmap(path, dtype, "r", shape=(count,)) if count else numpy.empty(0, dtype)


def write(
    encoder: Encoder,
    records: Records,
    start: int,
    stop: int,
    folder: Path,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Encode the records from ``start`` to ``stop`` into a new folder.

    ``progress`` is called with the number of finished records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    report = Report()
    lengths: list[int] = []
    sources: list[int] = []
    with (folder / "ids.bin").open("wb") as ids, (folder / "learned.bin").open("wb") as learned:
        for number, _, made in encoded(encoder, records, start, stop):
            if progress is not None and (number - start) % BATCH == 0:
                progress(number - start)
            for document in note(report, records, number, made):
                ids.write(numpy.array(document.ids, numpy.int32).tobytes())
                learned.write(numpy.array(document.learned, numpy.bool_).tobytes())
                lengths.append(len(document.ids))
                sources.append(number)
    _write_index(folder, lengths, sources, report)


def encoded(
    encoder: Encoder, records: Records, start: int, stop: int
) -> "Iterator[tuple[int, Any, list[Encoded] | RefusedError]]":
    """Yield number, content and encoded documents (or refusal) of the records from ``start`` to ``stop``."""
    for begin in range(start, stop, BATCH):
        numbers = range(begin, min(begin + BATCH, stop))
        batch = [(read(records, number), records.source_of(number)[0]) for number in numbers]
        for number, (record, _), made in zip(numbers, batch, encoder.encode(batch), strict=True):
            yield number, record, made


def read(records: Records, number: int) -> Any:
    """Return a record, or its ``RefusedError``."""
    try:
        return records.record(number)
    except RefusedError as refusal:
        return refusal


def note(report: Report, records: Records, number: int, made: "list[Encoded] | RefusedError") -> list[Encoded]:
    """Count a record in the report; return the documents to train on."""
    report.read += 1
    place = records.place(number)
    if isinstance(made, RefusedError):
        report.refuse(place, str(made))
        return []
    if not made:
        report.dropped.add(place, "longer than training.sequence_length")
        return []
    kept = [document for document in made if document.label_tokens]
    tokens = sum(len(document.ids) for document in made)
    first = made[0]
    if first.cut:
        report.cut.add(place, f"{first.cut:,} of {tokens + first.cut:,} tokens are cut away")
    if first.split > 1:
        report.split.add(place, f"{tokens:,} tokens make {first.split} sequences")
    if not kept:
        cut = "its labels are all cut away" if first.cut else "no token carries loss"
        report.unlabelled.add(place, cut)
    elif any(document.ends_learned < document.turns for document in made):
        report.unended.add(place, "a turn is learned without its end" + (", which is cut away" if first.cut else ""))
    if first.merged:
        report.merged.add(place, "the first token of a turn also holds the end of its header, and carries no loss")
    if first.reasoning_lost:
        report.reasoning_lost.add(place, "the template leaves the reasoning of a turn out")
    return kept


def join(parts: list[Path], folder: Path) -> None:
    """Join the folders of consecutive parts of the records into one, and remove them."""
    report = Report()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("ids.bin", "learned.bin"):
        with (folder / name).open("wb") as output:
            for part in parts:
                with (part / name).open("rb") as content:
                    shutil.copyfileobj(content, output, 1 << 20)
    for part in parts:
        report.merge(msgspec.json.decode((part / "meta.json").read_bytes(), type=Meta).report)
    lengths = numpy.concatenate([numpy.load(part / "lengths.npy") for part in parts])
    sources = numpy.concatenate([numpy.load(part / "records.npy") for part in parts])
    _write_index(folder, lengths, sources, report)
    for part in parts:
        shutil.rmtree(part)


def _write_index(folder: Path, lengths: Any, sources: Any, report: Report) -> None:
    numpy.save(folder / "lengths.npy", numpy.array(lengths, numpy.int64))
    numpy.save(folder / "records.npy", numpy.array(sources, numpy.int64))
    digest = hashlib.blake2b(numpy.array(lengths, numpy.int64).tobytes(), digest_size=16)
    for name in ("ids.bin", "learned.bin"):
        with (folder / name).open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
    (folder / "meta.json").write_bytes(msgspec.json.encode(Meta(report, digest.hexdigest())))


def opened(folder: Path) -> Documents | None:
    """Return the documents of a folder; None if they are incomplete."""
    try:
        return Documents(folder)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None


def scratch(folder: Path) -> Path:
    """Make a temporary folder beside ``folder``, to be renamed to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))


def publish(made: Path, folder: Path) -> None:
    """Rename a complete folder to its final name; a complete one of another run is kept."""
    if opened(folder) is not None:
        shutil.rmtree(made)
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        os.replace(made, folder)
    except OSError:
        if opened(folder) is None:
            raise
        shutil.rmtree(made)
