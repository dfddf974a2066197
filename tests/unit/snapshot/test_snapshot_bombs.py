"""A small file that stands for gigabytes is refused before anything of it is built."""

import gzip
import pickle
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.host.machine import available_memory
from ftmon.protocol.snapshot.columns import SnapshotError
from ftmon.protocol.snapshot.reader import check_cost, estimate, granted_memory, read_pickle
from hypothesis import given
from hypothesis import strategies as st
from snapshot_files import DATA, ELEMENTS, bomb


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_a_packed_file_of_small_objects_is_refused_before_they_are_made(tmp_path: Path, element: bytes) -> None:
    path = bomb(tmp_path, element)
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError, match="refused: it asks for far more memory than its size justifies"):
        read_pickle(path, most_bytes=2**32, most_memory=2**30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_packed_file_that_expands_more_than_snapshots_do_is_refused_early(tmp_path: Path) -> None:
    path = tmp_path / "zeros.pickle.gz"
    part = gzip.compress(bytes(2**24))
    path.write_bytes(gzip.compress(b"\x80\x04\x8e" + (2**32).to_bytes(8, "little")) + part * 256)
    with pytest.raises(SnapshotError, match="refused: it unpacks to more than"):
        read_pickle(path)


@pytest.mark.parametrize("name", ["oom_backward", "step_zero3"])
def test_a_real_snapshot_is_far_below_the_bound(name: str) -> None:
    path = DATA / f"{name}.pickle.gz"
    check_cost(path, most_memory=path.stat().st_size * 200)


def test_what_is_granted_is_bounded_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(2**36)
    assert available_memory() > 0
    monkeypatch.setattr("ftmon.protocol.snapshot.reader.available_memory", lambda: 2**20)
    assert granted_memory(path) == 2**19


OBJECTS = {
    "float": b"G\x3f\xf0\x00\x00\x00\x00\x00\x01",
    "text float": b"F1\n",
    "int": b"M\xe8\x03",
    "long": b"\x8a\x09" + b"\x7f" * 9,
    "text int": b"I300\n",
    "string": b"\x8c\x02ab",
    "string in the memo": b"\x8c\x02ab\x94",
    "wide string": b"\x8c\x14" + b"a" * 16 + "\U0001f600".encode(),
    "bytes": b"C\x02ab",
    "dictionary of one": b"}K\x01Ns",
    "dictionary from a mark": b"(K\x01Nd",
    "dictionary of six": b"}(" + b"".join(b"K%cN" % key for key in range(6)) + b"u",
    "dictionary of 200": b"}(" + b"".join(b"K%cN" % key for key in range(200)) + b"u",
    "list of one": b"]Na",
    "list from a mark": b"(Nl",
    "list of ten": b"](" + b"N" * 10 + b"e",
    "tuple from a mark": b"(Nt",
    "tuple of three": b"NNN\x87",
    "set": b"\x8f(" + b"".join(b"K%c" % key for key in range(5)) + b"\x90",
    "frozen set": b"(K\x01\x91",
    "reference": b"h\x00",
    **ELEMENTS,
}


def taken(data: bytes) -> int:
    """Return the bytes that unpickling takes at its highest."""
    tracemalloc.start()
    try:
        kept = pickle.loads(data)
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("element", OBJECTS.values(), ids=OBJECTS)
def test_no_object_takes_more_than_its_opcodes_are_counted_for(element: bytes) -> None:
    data = b"\x80\x04]\x94" + b"(" + element * 5000 + (b"t" * 5000 if element == b"(" else b"") + b"e."
    assert taken(data) < estimate(data) + 100_000


def plain() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    keys = st.integers() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner))


@given(plain(), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_take_less_than_is_counted_in_every_protocol(value: Any, protocol: int) -> None:
    data = pickle.dumps([value] * 3, protocol)
    assert taken(data) < estimate(data) + 100_000
