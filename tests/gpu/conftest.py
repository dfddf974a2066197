"""Tests that compare the memory in use on the GPUs run alone on them; the others share them."""

import fcntl
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from ftmon_process import Ftmon, ftmon_home


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hold a lock that the workers of a run share, before the test's time begins; pytest calls this for all tests."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    alone = item.get_closest_marker("gpu_alone") is not None
    with Path(tempfile.gettempdir(), "ftmon-test-gpus.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        return (yield)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home") as ftmon:
        yield ftmon
