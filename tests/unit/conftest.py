"""What every unit test needs, and that none starts a process."""

import multiprocessing.process
import multiprocessing.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from simulated_run import Sim

STARTS = (
    (subprocess.Popen, "__init__"), (multiprocessing.process.BaseProcess, "start"),
    (multiprocessing.util, "spawnv_passfds"), (os, "fork"), (os, "forkpty"), (os, "posix_spawn"),
    (os, "posix_spawnp"), (os, "system"),
)  # fmt: skip
"""What begins a process in Python."""


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    """Fail a test that starts a process, even one that is content when none starts."""
    refused: list[str] = []

    def refusing(name: str) -> Callable[..., None]:
        def refuse(*_arguments: object, **_options: object) -> None:
            refused.append(name)
            raise AssertionError(f"a unit test starts a process ({name}): it belongs in tests/integration")

        return refuse

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTS:
            patch.setattr(owner, name, refusing(f"{owner.__name__}.{name}"))
        yield
    assert not refused, f"a unit test starts a process ({refused[0]}): it belongs in tests/integration"


@pytest.fixture(scope="module", autouse=True)
def _nothing_compiled() -> None:
    """Forget what other files' tests compiled in this process: the probe asks PyTorch whether anything was."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


@pytest.fixture(scope="session")
def make_sim() -> type[Sim]:
    """The class of simulated runs: ``make_sim(ranks=4, cuda=False)``."""
    return Sim
