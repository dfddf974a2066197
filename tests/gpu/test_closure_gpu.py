"""Optimizers with closures on a GPU: every phase's peak against the script's own measurement without ftmon."""

import json
import os
import subprocess
import sys

import pytest
from ftmon.protocol.messages.telemetry import Step
from probe_collector import SCRIPTS

pytestmark = pytest.mark.gpu
if not os.path.exists("/dev/nvidia0"):
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

SCRIPT = SCRIPTS / "gpu_closure.py"


def result_of(text):
    return json.loads(next(line for line in text.splitlines() if line.startswith("RESULT"))[6:])


@pytest.mark.parametrize("kind", ["adamw", "lbfgs"])
def test_peaks_of_a_closure_s_phases_equal_those_measured_by_hand(collector, kind):
    done = subprocess.run([sys.executable, SCRIPT, "hand", kind], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    hand = result_of(done.stdout)
    collector.start(sys.executable, SCRIPT, "plain", kind, CUDA_VISIBLE_DEVICES="0").finish(180)
    assert collector.job.returncode == 0, collector.output()
    steps = collector.of(Step)
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    for step, peaks, loss in zip(steps, hand["phases"], hand["losses"], strict=True):
        assert {name: step.phase(name).allocated.peak for name in peaks} == peaks
        assert step.loss == pytest.approx(loss, rel=1e-4)
        assert step.phase("optimizer").device_us is not None
    assert all(step.phase("backward").count >= (2 if kind == "lbfgs" else 1) for step in steps[:2])
