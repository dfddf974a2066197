"""Under NCCL the rank at fault is named with its line, and after the kill the GPUs' memory is back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "gpu" / "stalls.py"


def gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU") for line in listed.splitlines())


pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone, pytest.mark.skipif(gpus() < 2, reason="needs two NVIDIA GPUs")]


@pytest.mark.parametrize("kind", ["missing", "ddp", "native", "stop", "exit"])
def test_a_stall_under_nccl_is_told_in_seconds_and_leaves_nothing(kind: str, tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH), "--gpus", "2", "--kinds", kind, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    (row,) = json.loads(found.read_text())
    assert done.returncode == 0, row
    assert row["ok"], row
    assert row["memory_back"], row
    assert row["seconds"] < (20 if kind == "exit" else 12), row
