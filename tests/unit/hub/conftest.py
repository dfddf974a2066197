"""Runs in a private home."""

from pathlib import Path

import pytest
from ftmon.protocol import run_store
from ftmon.protocol.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("FTMON_RUN", raising=False)
    return run_store.create("unit", ["true"], "run")
