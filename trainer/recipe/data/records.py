"""Records of files and of data sets on the hub, with their places (file and line) for errors."""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from ....protocol.errors import ConfigError
from ..config.schema import Config, File
from .messages import BOM, RefusedError, Source, delimited, is_json_list, json_list, parse, utf8

_CHUNK = 16 << 20
_ROWS = 10_000  # of Parquet read at a time


class Lines(Source):
    """A record for each line that is not blank: JSON, or with ``column`` a text under that name."""

    def __init__(self, path: Path, column: str = "") -> None:
        digest, starts, ends = _index(path)
        super().__init__(starts, path.name, digest)
        self._column = column
        self._file = path.open("rb")
        self._starts, self._ends = starts, ends
        short = numpy.flatnonzero(ends - starts < 64)
        blank = [line for line in short.tolist() if not self._bytes(line).strip()]
        self.blank = [f"{path.name}:{line + 1}" for line in blank]
        self._rows = numpy.delete(numpy.arange(len(starts)), blank)

    def place(self, index: int) -> str:
        """Return ``file:line``."""
        return f"{self._name}:{self._rows[index] + 1}"

    def record(self, index: int) -> Any:
        """Return the record of a line; raise ``RefusedError`` if it is not UTF-8, or not JSON."""
        line = int(self._rows[index])
        try:
            text = utf8(self._bytes(line).removeprefix(b"" if line else BOM))
            return {self._column: text.rstrip("\r\n")} if self._column else parse(text)
        except ValueError as error:
            raise RefusedError(str(error)) from None

    def _bytes(self, line: int) -> bytes:
        start = int(self._starts[line])
        self._file.seek(start)
        return self._file.read(int(self._ends[line]) - start)


def _index(path: Path) -> tuple[str, NDArray[numpy.int64], NDArray[numpy.int64]]:
    """Return the hash of a file, and the start and end of each line (without its newline)."""
    digest = hashlib.blake2b()
    found = [numpy.empty(0, numpy.int64)]
    size, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            found.append(numpy.flatnonzero(numpy.frombuffer(chunk, numpy.uint8) == 10) + size)
            size, last = size + len(chunk), chunk[-1:]
    ends = numpy.concatenate([*found, [] if last == b"\n" else [size]]).astype(numpy.int64)
    return digest.hexdigest(), numpy.concatenate([[0], ends[:-1] + 1])[: len(ends)].astype(numpy.int64), ends


class Rows(Source):
    """Rows of a ``datasets.Dataset``."""

    def record(self, index: int) -> Any:
        """Return a row without the nulls with which Arrow fills structures of different keys."""
        return {column: _without_nulls(value) for column, value in self._rows[index].items()}

    def place(self, index: int) -> str:
        """Return ``name:row N``, from 1."""
        return f"{self._name}:row {index + 1}"


class Records:
    """All records of a configuration, in order."""

    def __init__(self, sources: Sequence[Source], limit: int = 0) -> None:
        self.sources = sources
        self._ends = list(accumulate(map(len, sources)))
        self._count = min(limit, self._ends[-1]) if limit else self._ends[-1]

    def __len__(self) -> int:
        return self._count

    def source_of(self, index: int) -> tuple[int, int]:
        """Return the source of a record, and its number there."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        number, inside = self.source_of(index)
        return self.sources[number].record(inside)

    def place(self, index: int) -> str:
        """Return the place of a record."""
        number, inside = self.source_of(index)
        return self.sources[number].place(inside)

    def first(self, source: int) -> dict[str, Any] | None:
        """Return the first JSON object among the first hundred records of a source, or None."""
        start = self._ends[source - 1] if source else 0
        found = Records([self.sources[source]], min(100, self._ends[source] - start))
        return next((record for _, record in found if isinstance(record, dict)), None)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield each readable record with its number."""
        return self.some(range(len(self)))

    def some(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yield each readable record of these numbers, with its number."""
        for index in numbers:
            try:
                yield index, self.record(index)
            except RefusedError:
                continue

    @property
    def digest(self) -> str:
        """Hash of all contents and of the number of records used."""
        parts = [source.digest for source in self.sources] + [str(self._count)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


class Selected(Source):
    """Some records of others, by their numbers."""

    def __init__(self, records: Records, numbers: Sequence[int], selection: str) -> None:
        super().__init__(numbers, "", f"{records.digest} {selection}")
        self._records = records
        self.blank = [place for source in records.sources for place in source.blank]

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        return self._records.record(self._rows[index])

    def place(self, index: int) -> str:
        """Return the place of a record in its file."""
        return self._records.place(self._rows[index])


def read_records(config: Config) -> Records:
    """Open the records; a file or data set that cannot be read, or has no record, is a ``ConfigError``."""
    data = config.data
    if data.name:
        records = Records([_from_folder(config) or _from_hub(config)], data.limit)
    else:
        files = data.files or [File(data.path)]
        records = Records([_open(file, config) for file in files], data.limit)
    if not len(records):
        raise ConfigError(f"data: {data.path or data.name or 'its files'}: no records")
    return records


def _open(file: File, config: Config) -> Source:
    path, where = (
        Path(file.path),
        "data.name" if config.data.name else "data.files" if config.data.files else "data.path",
    )
    try:
        match path.suffix:
            case ".parquet":
                source = _parquet(path)
            case ".csv" | ".tsv":
                source = delimited(path)
            case ".json" if is_json_list(path):
                source = json_list(path)
            case _:
                source = Lines(path, config.data.text_column if path.suffix == ".txt" else "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    source.weight = file.weight
    return source


def _parquet(path: Path) -> Source:
    import datasets
    from pyarrow import parquet

    datasets.disable_progress_bars()
    # It also logs its errors, which the refusal repeats.
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)
    try:
        # datasets 5.2 fails for a file without rows, and reads as many at a time as its first group has, if not none.
        given: Any = {"data_files": str(path), "split": "train", "batch_size": _ROWS}
        rows: Any = datasets.load_dataset("parquet", **given) if parquet.read_metadata(path).num_rows else []
    except Exception as error:  # datasets raises its own errors, pyarrow's and the file system's
        raise ValueError(_cause(error)) from None
    with path.open("rb") as file:
        return Rows(rows, path.name, hashlib.file_digest(file, "blake2b").hexdigest())


_TEXT = (".jsonl", ".json", ".csv", ".tsv", ".txt")
_ROWS_OF_DATA = (".jsonl", ".csv", ".tsv", ".parquet")  # Files that are nothing but data


def _from_folder(config: Config) -> Source | None:
    """Read a local folder of text files as single files are read; None if it has others, or settings of its own.

    ``datasets`` 5.2 changes values: it makes timestamps of a column of ISO dates, and numbers of texts in CSV.
    """
    data = config.data
    if not Path(data.name).is_dir():
        return None
    import datasets

    try:
        settings: Any = datasets.load_dataset_builder(data.name, data.subset or None).config
        default = type(settings)()
    except Exception:  # ``_from_hub`` reports it
        return None
    files: dict[str, list[str]] = {str(split): list(map(str, paths)) for split, paths in settings.data_files.items()}
    paths = [path for several in files.values() for path in several]
    if not (data.subset or settings.name != "default" or "configs:" in _card(data.name)):
        _refuse_left_out(data.name, paths)
    default.sep = "\t" if any(path.endswith(".tsv") for path in paths) else ","
    own = ("name", "data_files", "data_dir", "version", "description")
    if not all(path.endswith(_TEXT) and Path(path).is_file() for path in paths) or any(
        getattr(settings, name, value) != value for name, value in vars(default).items() if name not in own
    ):
        return None
    splits = {name: Records([_open(File(path), config) for path in paths]) for name, paths in files.items()}
    try:
        read = datasets.ReadInstruction.from_spec(data.split)
        parts: list[Any] = read.to_absolute({name: len(records) for name, records in splits.items()})
    except Exception as error:
        raise ConfigError(f"data.split: {data.split}: {_cause(error)}") from None
    found = [Selected(splits[part.splitname], range(part.from_, part.to), f"{part.from_}:{part.to}") for part in parts]
    return found[0] if len(found) == 1 else Selected(Records(found), range(sum(map(len, found))), "")


def _card(folder: str) -> str:
    """Return the card of a data set in a folder, which may say which files are its own."""
    try:
        return Path(folder, "README.md").read_text(errors="replace")
    except OSError:
        return ""


def _refuse_left_out(folder: str, read: list[str]) -> None:
    """Refuse a folder of several kinds of files, of which ``datasets`` reads the most frequent and is silent."""
    found = [path for path in Path(folder).rglob("*") if path.suffix in _ROWS_OF_DATA]
    names = sorted(str(path.relative_to(folder)) for path in found)
    kept = {Path(path).suffix for path in read}
    left = [name for name in names if Path(name).suffix not in kept and not any(p[0] in "._" for p in Path(name).parts)]
    if left and kept:
        raise ConfigError(
            f"data.name: {folder}: datasets would read its {' and '.join(sorted(kept))} files alone, not "
            f"{', '.join(left[:3])}{', ...' * (len(left) > 3)}; name all in data.files, or move the others away"
        )


def _from_hub(config: Config) -> Source:
    import datasets

    datasets.disable_progress_bars()
    data = config.data
    if (Path(data.name) / "state.json").is_file():
        raise ConfigError(
            f"data.name: {data.name} was written by save_to_disk, for load_from_disk alone; write the data set with "
            "to_parquet or to_json, and give that file as data.path"
        )
    try:
        rows: Any = datasets.load_dataset(data.name, data.subset or None, split=data.split)
    except Exception as error:  # as above, and the hub's
        if not data.subset and (subsets := _subsets(data.name)):
            raise ConfigError(f"data.subset: {data.name} has several, name one: {', '.join(subsets)}") from None
        raise ConfigError(f"data.name: {data.name} cannot be read: {_cause(error)}") from None
    if not isinstance(rows, datasets.Dataset):
        raise ConfigError(f"data.split: {data.split} is not one split of {data.name}")
    return Rows(rows, data.name, str(rows._fingerprint))


def _subsets(name: str) -> list[str]:
    """Return the first configurations of a data set that has several; empty if it has one, or cannot be read."""
    import datasets

    try:
        found: list[str] = datasets.get_dataset_config_names(name)
    except Exception:
        return []
    return found[:20] if len(found) > 1 else []


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(below) for key, below in value.items() if below is not None}
    if isinstance(value, list):
        return [_without_nulls(below) for below in value]
    return value
