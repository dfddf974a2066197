"""What every unit test needs."""

import sys
from typing import Any

import pytest
from simulated_run import Sim


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
