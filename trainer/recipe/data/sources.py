"""Records of files and of data sets on the hub, with their places (file and line) for errors."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ....protocol.errors import ConfigError
from ..config.schema import Config, File
from .lines import JsonLines, PlainLines, Rows
from .messages import RefusedError
from .tables import delimited, is_json_list, json_list


class Source(Protocol):
    """Records of one file or data set."""

    weight: float

    def __len__(self) -> int: ...

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        ...

    def place(self, index: int) -> str:
        """Return the place of a record: ``train.jsonl:12``."""
        ...

    @property
    def digest(self) -> str:
        """Hash of the content."""
        ...


class Records:
    """All records of a configuration, in order."""

    def __init__(self, sources: list[Source], limit: int = 0) -> None:
        self.sources = sources
        self._ends: list[int] = []
        total = 0
        for source in sources:
            total += len(source)
            self._ends.append(total)
        self._count = min(limit, total) if limit else total

    def __len__(self) -> int:
        return self._count

    def source_of(self, index: int) -> tuple[int, int]:
        """Return the source of a record, and its number there."""
        for number, end in enumerate(self._ends):
            if index < end:
                return number, index - (self._ends[number - 1] if number else 0)
        raise IndexError(index)

    def record(self, index: int) -> Any:
        """Return a record; raise ``RefusedError`` if it is not one."""
        number, inside = self.source_of(index)
        return self.sources[number].record(inside)

    def place(self, index: int) -> str:
        """Return the place of a record."""
        number, inside = self.source_of(index)
        return self.sources[number].place(inside)

    def weight(self, index: int) -> float:
        """Return the number of uses of a record in an epoch."""
        return self.sources[self.source_of(index)[0]].weight

    def first(self, source: int) -> dict[str, Any] | None:
        """Return the first JSON object among the first hundred records of a source, or None."""
        found = self.sources[source]
        for index in range(min(len(found), 100)):
            try:
                record = found.record(index)
            except RefusedError:
                continue
            if isinstance(record, dict):
                return record
        return None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yield each readable record with its number."""
        for index in range(len(self)):
            try:
                yield index, self.record(index)
            except RefusedError:
                continue

    @property
    def digest(self) -> str:
        """Hash of all contents and of the number of records used."""
        parts = [source.digest for source in self.sources] + [str(self._count)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()


def read(config: Config) -> Records:
    """Open the records.

    Raises:
        ConfigError: a file or data set cannot be read, or has no record.
    """
    data = config.data
    if data.name:
        records = Records([_from_hub(config)], data.limit)
    else:
        files = data.files or [File(data.path)]
        records = Records([_open(file, config) for file in files], data.limit)
    if not len(records):
        raise ConfigError(f"data: {data.path or data.name or 'its files'}: no records")
    return records


def _open(file: File, config: Config) -> Source:
    path = Path(file.path)
    where = "data.files" if config.data.files else "data.path"
    try:
        match path.suffix:
            case ".parquet":
                return _parquet(path, file.weight, where)
            case ".csv" | ".tsv":
                return delimited(path, file.weight)
            case ".txt":
                return PlainLines(path, file.weight, config.data.text_column)
            case ".json":
                return json_list(path, file.weight) if is_json_list(path) else JsonLines(path, file.weight)
            case _:
                return JsonLines(path, file.weight)
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{where}: {path} cannot be read: {error}") from None


def _parquet(path: Path, weight: float, where: str) -> Source:
    import datasets

    datasets.disable_progress_bars()
    # It also logs its errors, which the refusal below repeats.
    logging.getLogger("datasets.packaged_modules.parquet.parquet").setLevel(logging.CRITICAL)
    try:
        rows: Any = datasets.load_dataset("parquet", data_files=str(path), split="train")
    except Exception as error:  # datasets raises its own errors, pyarrow's and the file system's
        raise ConfigError(f"{where}: {path} cannot be read: {_cause(error)}") from None
    return Rows(rows, path.name, weight, _file_digest(path))


def _from_hub(config: Config) -> Source:
    import datasets

    datasets.disable_progress_bars()
    data = config.data
    try:
        rows: Any = datasets.load_dataset(data.name, data.subset or None, split=data.split)
    except Exception as error:  # as above, and the hub's
        if not data.subset and (subsets := _subsets(data.name)):
            raise ConfigError(f"data.subset: {data.name} has several, name one: {', '.join(subsets)}") from None
        raise ConfigError(f"data.name: {data.name} cannot be read: {_cause(error)}") from None
    if not isinstance(rows, datasets.Dataset):
        raise ConfigError(f"data.split: {data.split} is not one split of {data.name}")
    return Rows(rows, data.name, 1.0, str(rows._fingerprint))


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


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
