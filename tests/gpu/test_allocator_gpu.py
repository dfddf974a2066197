"""The allocator's model against traces recorded here and now."""

import subprocess
import sys
from pathlib import Path

import pytest
from ftmon.trainer.recipe.hardware import usable_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not usable_gpus(), reason="no GPU that PyTorch could use")]

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "allocator_traces.py"


def test_random_programs_get_the_recorded_segments_with_and_without_expandable_segments(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--only", "random", "--kinds", "native,expandable"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "16 traces: 16 with the recorded segments exactly, 16 with reserved bytes within 2 %" in done.stdout
