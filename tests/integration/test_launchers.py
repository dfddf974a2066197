"""Launchers as they are installed, across two nodes with real ssh: what ``bench.launchers`` plays, where it can."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["pdsh", "slurm-batch"])
def test_a_training_on_two_nodes_begun_by(kind: str) -> None:
    words = [sys.executable, "-m", "bench.launchers", "--kinds", kind]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.stdout, done.stderr
    row = json.loads(done.stdout.splitlines()[0])
    if row["ok"] is None:
        pytest.skip(row["end"])
    assert row["ok"], row
