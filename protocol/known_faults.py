"""Versions of libraries with a known fault: the rows of ``known_faults.toml``."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class KnownFault:
    """A fault of some versions of a library."""

    library: str
    what: str
    remedy: str
    thread: str
    """Where it is discussed."""
    first: str
    before: str = ""
    """The first version without it; empty: none is known."""
    when: Mapping[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Values of fields of ``Hello`` with which it happens; empty: not seen in them."""

    def has(self, version: str) -> bool:
        """Return whether a version has it."""
        return _parts(self.first) <= _parts(version) and not (self.before and _parts(version) >= _parts(self.before))


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Return all rows."""
    rows = tomllib.loads(files(__package__ or "").joinpath("known_faults.toml").read_text(encoding="utf-8"))["fault"]
    return tuple(KnownFault(first=row.pop("from"), **row) for row in rows)


def faults_of(versions: Mapping[str, str]) -> Iterator[tuple[KnownFault, str]]:
    """Yield the faults of these versions by library, each with the version."""
    for fault in known_faults():
        version = versions.get(fault.library)
        if version and fault.has(version):
            yield fault, version


def _parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``0.19.8+cpu`` has 0, 19 and 8."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
