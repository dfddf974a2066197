"""The jobs of a driver script on screen: finished, out of memory, failed before its first step, training."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jobscenes import driven
from scenes import both, picture

PICTURES = {
    "the jobs with the one that trains": both("J"),
    "a job out of memory": both("J", "up", "up"),
    "a job that failed before its first step": picture("J", "up"),
    "the overview names the job": picture(),
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return driven(tmp_path_factory.mktemp("jobs") / "recording.sqlite")


@pytest.fixture
def shows(plays: Callable[..., bool], driver: Path) -> Callable[..., bool]:
    return partial(plays, driver)


def test_picture(shows: Callable[..., bool], picture: tuple[Any, Any]) -> None:
    assert shows(*picture[0], **picture[1])
