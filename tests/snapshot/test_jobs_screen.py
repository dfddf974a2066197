"""The jobs of a driver script on screen: finished, out of memory, failed before its first step, training."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from jobscenes import driven

SIZES = [(80, 24), (200, 60)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driven(tmp_path_factory.mktemp("jobs") / "recording.sqlite")


@pytest.fixture
def shows(plays: Callable[..., bool], driver: Path) -> Callable[..., bool]:
    return partial(plays, driver)


@pytest.mark.parametrize("size", SIZES)
def test_the_jobs_with_the_one_that_trains(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows(size, "J")


@pytest.mark.parametrize("size", SIZES)
def test_a_job_out_of_memory(shows: Callable[..., bool], size: tuple[int, int]) -> None:
    assert shows(size, "J", "up", "up")


def test_a_job_that_failed_before_its_first_step(shows: Callable[..., bool]) -> None:
    assert shows((80, 24), "J", "up")


def test_the_overview_names_the_job(shows: Callable[..., bool]) -> None:
    assert shows((80, 24))
