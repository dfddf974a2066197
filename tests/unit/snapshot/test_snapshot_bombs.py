"""A small file that stands for gigabytes is refused before anything of it is built."""

import resource
from pathlib import Path

import pytest
from ftmon.protocol.snapshot.errors import SnapshotError
from ftmon.protocol.snapshot.unpickle import available_memory, check_cost, granted_memory, read_pickle
from snapshot_files import DATA, ELEMENTS, bomb


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_a_packed_file_of_small_objects_is_refused_before_they_are_made(tmp_path: Path, element: bytes) -> None:
    path = bomb(tmp_path, element)
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError, match="refused: it asks for far more memory than its size justifies"):
        read_pickle(path, most_memory=2**30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


@pytest.mark.parametrize("name", ["oom_backward", "step_zero3"])
def test_a_real_snapshot_is_far_below_the_bound(name: str) -> None:
    path = DATA / f"{name}.pickle.gz"
    check_cost(path, most_memory=path.stat().st_size * 400)


def test_what_is_granted_is_bounded_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(2**36)
    assert available_memory() > 0
    monkeypatch.setattr("ftmon.protocol.snapshot.unpickle.available_memory", lambda: 2**20)
    assert granted_memory(path) == 2**19
