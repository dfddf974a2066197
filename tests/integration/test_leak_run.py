"""A leak in a real script, found by the real probe and hub."""

import sys
from pathlib import Path

import pytest
from ftmon.protocol.recording.reader import Reader
from ftmon_process import Ftmon

SCRIPT = """
import torch

MIB = 2**20
total = int(open("/proc/meminfo").readline().split()[1]) * 1024
# Well above what counts on the CPU: 0.5 % of the host's memory, between 64 and 512 MiB, within 64 steps.
size = min(512 * MIB, max(64 * MIB, total // 200)) * 2 // 60
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for step in range(95):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    kept.append(torch.ones(size // 4))
"""


def test_a_script_that_keeps_memory_in_every_step_is_told_so_with_the_rate(home: Ftmon, tmp_path: Path) -> None:
    script = tmp_path / "leaky.py"
    script.write_text(SCRIPT)
    done = home.run("run", "--", sys.executable, str(script), seconds=480)
    assert done.returncode == 0, done.stdout + done.stderr
    with Reader(home.newest().recording) as reader:
        (alert,) = [alert for alert in reader.alerts() if alert.kind == "leak"]
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    size = min(512 * 2**20, max(64 * 2**20, total // 200)) * 2 // 60
    assert alert.evidence["bytes_per_step"] == pytest.approx(size, rel=0.15)
    assert alert.evidence["measure"] == "resident"
    assert alert.evidence["full_at_step"] > 95
    assert "memory grows by" in done.stdout, "the follower of the run is told"
