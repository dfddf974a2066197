"""What ``ftmon doctor`` checks: the packages of the training side, and versions of libraries.

Versions with a known fault are in ``known_faults.toml``, tested ones in ``tested_versions.toml``.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import msgspec

TRAINING_PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft")
"""The packages that ftmon's own trainer and its predictions need: ``ftmon[train]`` installs and a rank imports them."""
State = Literal["ok", "note", "warning", "error"]  # `note`: to know of, with nothing to fix


class Check(msgspec.Struct, frozen=True):
    """Result of one check of this machine."""

    name: str
    state: State
    text: str
    remedy: str = ""  # how to fix a warning or an error


@dataclass(frozen=True)
class KnownFault:
    """A fault of some versions of a library."""

    library: str
    what: str
    remedy: str
    thread: str  # where it is discussed
    first: str
    before: str = ""  # the first version without it; empty: none is known
    when: Mapping[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    """Values of fields of ``Hello`` with which it happens; empty: not seen in them."""

    def has(self, version: str) -> bool:
        """Return whether a version has it."""
        found = version_parts(version)
        return version_parts(self.first) <= found and not (self.before and found >= version_parts(self.before))


@cache
def known_faults() -> tuple[KnownFault, ...]:
    """Return all rows."""
    return tuple(KnownFault(first=row.pop("from"), **row) for row in _table("known_faults.toml")["fault"])


def faults_of(versions: Mapping[str, str]) -> Iterator[tuple[KnownFault, str]]:
    """Yield the faults of these versions by library, each with the version."""
    for fault in known_faults():
        version = versions.get(fault.library)
        if version and fault.has(version):
            yield fault, version


@cache
def tested_versions() -> dict[str, tuple[str, str]]:
    """Return the oldest and the newest tested version by library."""
    return {library: (row["oldest"], row["newest"]) for library, row in _table("tested_versions.toml").items()}


@cache
def watched_versions() -> dict[str, str]:
    """Return the oldest version by library with which the tests of the probe and of ``ftmon run`` have run."""
    rows = _table("tested_versions.toml")
    return {library: row["watched"] for library, row in rows.items() if "watched" in row}


def version_check(library: str, version: str) -> Check:
    """Return the check of an installed version: a warning outside the tested ones; ok if the library has none."""
    if library not in tested_versions():
        return Check(library, "ok", version)
    oldest, newest = tested_versions()[library]
    tested = oldest if oldest == newest else f"{oldest} to {newest}"
    remedy = f"if something fails with it, install {tested}, which was tested"
    watched = watched_versions().get(library, oldest)
    if version_parts(watched) <= _compared(version, watched) and _compared(version, oldest) < version_parts(oldest):
        text = f"{version}: ftmon run was tested with it (oldest: {watched}), ftmon's own trainer from {oldest} on"
        return Check(library, "ok", text)
    if _compared(version, oldest) < version_parts(oldest):
        return Check(library, "warning", f"{version}, older than the oldest tested version, {oldest}", remedy)
    if _compared(version, newest) > version_parts(newest):
        return Check(library, "warning", f"{version}, newer than the newest tested version, {newest}", remedy)
    return Check(library, "ok", f"{version} (tested: {tested})")


def _compared(version: str, end: str) -> tuple[int, ...]:
    return version_parts(version)[: len(version_parts(end))]


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(files(__package__ or "").joinpath(name).read_text(encoding="utf-8"))


def version_parts(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: ``0.19.8+cpu`` has 0, 19 and 8."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
