"""Hangs that people report, and honest work that looks like one, under NCCL: who is named, and what is ended."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
HANGS = [
    "save-one", "left-loop", "left-script", "collective-if", "gather-one", "gather-unequal", "unequal-sizes",
    "asleep-data", "asleep-forward", "one-behind", "worker-hang", "stopped",
]  # fmt: skip
HONEST = [
    f"honest-{work}"
    for work in ("checkpoint", "evaluation", "compilation", "upload", "retries", "irregular", "generation", "run")
]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpu_alone,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]


def play(kinds: list[str], share: int, folder: Path) -> list[dict[str, Any]]:
    """Play scenes on two GPUs, several at a time; return their rows."""
    found = folder / "rows.jsonl"
    command = [sys.executable, "-m", "bench.scenarios", "--cuda", "--gpus", "2", "--share", str(share)]
    command += ["--parallel", str(share), "--step-ms", "0,300", "--kinds", ",".join(kinds), "--json", str(found)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(folder)}, timeout=1100, check=True)
    return [json.loads(line) for line in found.read_text().splitlines()]


def test_each_hang_is_named_with_its_cause_and_ended_in_short_and_long_steps(tmp_path: Path) -> None:
    rows = play(HANGS, 6, tmp_path)
    assert len(rows) == 2 * len(HANGS)
    for row in rows:
        assert (row["verdict"], row["ended"], row["left"]) == ("right", True, []), row


def test_honest_work_is_neither_reported_nor_ended(tmp_path: Path) -> None:
    rows = play(HONEST, 1, tmp_path)
    assert len(rows) == len(HONEST)
    for row in rows:
        assert (row["verdict"], row["alerts"], row["left"]) == ("right", [], []), row
