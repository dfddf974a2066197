"""Real out-of-memory errors on a GPU have the right verdict; one is held, looked at through a console, and let go."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).parents[2] / "bench/gpu/oom.py"
SCENES = ("backward", "recompute", "optimizer", "fragmentation", "logits", "large", "hold")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("scene", SCENES)
def test_what_is_said_of_a_real_failure_is_what_caused_it(scene: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(BENCH), "--only", scene, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    (result,) = json.loads(found.read_text())
    assert result["ok"], done.stdout
