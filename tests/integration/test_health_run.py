"""Findings of real ranks, from the probe over the hub to the recording and ``ftmon status``."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import start_ranks
from ftmon.protocol.host.machine import hierarchies
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Compiles, DiskSpace, Hello
from ftmon.protocol.messages.wire import Message
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import PROGRAM, Ftmon, wait_until_nothing_is_left

SCRIPT = Path(__file__).parent / "scripts" / "health_loop.py"


def played(home: Ftmon, faults: str, *options: str, **environ: str) -> tuple[RunDir, list[Message], str]:
    home.environ |= {"FAULT": faults, **environ}
    done = home.run("run", "--plain", *options, "--", *start_ranks.command(2, str(SCRIPT)), seconds=480)
    assert done.returncode == 0, done.stdout + done.stderr
    run = home.newest()
    wait_until_nothing_is_left(run)
    messages: list[Message] = []
    reader, seq = Reader(run.recording), 0
    while frames := reader.frames(seq, 5_000):
        seq = frames[-1].seq
        messages += [frame.message for frame in frames]
    reader.close()
    return run, messages, done.stdout


def health(messages: list[Message]) -> dict[str, Alert]:
    return {str(one.evidence["finding"]): one for one in messages if isinstance(one, Alert) and one.kind == "health"}


def test_a_healthy_run_has_known_disks_and_no_finding(home):
    run, messages, _ = played(home, "", STEPS="60")
    disks = [one for one in messages if isinstance(one, DiskSpace)]
    assert [one for one in health(messages).values() if one.evidence["finding"] != "disk_filling"] == []
    assert any(str(run.path).startswith(volume.path) or volume.use for volume in disks[0].volumes)
    loaders = [one.loader for one in messages if isinstance(one, Hello) and one.loader is not None]
    assert all(one.workers == 0 and one.cpus >= 1 for one in loaders)


def test_waiting_for_data_nan_and_recompilations_are_told_with_their_figures(home):
    run, messages, output = played(home, "loader,nan,compile", STEPS="110", AT="15", TORCHDYNAMO_DISABLE="0")
    found = health(messages)
    data = found["input_bound"]
    assert data.evidence["loader"]["workers"] == 0
    assert data.evidence["share"] > 0.25
    assert "workers" in data.evidence["remedy"], "how many would hide it, or that there are too few processors"
    assert "waits for data" in home.run("status", run.id).stdout
    nan = found["nan_loss"]
    assert (nan.evidence["first_rank"], nan.evidence["first_step"]) == (1, 16)
    assert nan.evidence["last_good_step"] == 15
    assert nan.evidence["finite_elsewhere"]
    assert "NaN loss on rank 1 since step 16" in output
    again = found["recompilation"]
    assert "health_loop.py" in again.evidence["function"]
    assert again.evidence["recompiles"] >= 4
    assert "size mismatch" in again.evidence["reason"]
    assert any(isinstance(one, Compiles) and one.total >= 5 for one in messages)


LEAKS = """
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


def test_a_script_that_keeps_memory_in_every_step_is_told_so_with_the_rate(home, tmp_path):
    script = tmp_path / "leaky.py"
    script.write_text(LEAKS)
    done = home.run("run", "--", sys.executable, str(script), seconds=480)
    assert done.returncode == 0, done.stdout + done.stderr
    with Reader(home.newest().recording) as reader:
        (alert,) = [alert for alert in reader.alerts() if alert.kind == "leak"]
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    size = min(512 * 2**20, max(64 * 2**20, total // 200)) * 2 // 60
    assert alert.evidence["bytes_per_step"] == pytest.approx(size, rel=0.15)
    assert alert.evidence["measure"] == "resident"
    assert alert.evidence["full_at_step"] > 95
    assert "memory grows by" in done.stdout, "the lines of the command that follows the run"


@contextmanager
def memory_group(limit: int) -> Iterator[Path]:
    """Make a control group below this process's that allows ``limit`` bytes."""
    for own, _ in hierarchies("memory", "self"):
        group = own / f"ftmon-test-{os.getpid()}"
        try:
            group.mkdir(exist_ok=True)
            name = next(name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
            (group / name).write_text(str(limit))
        except (OSError, StopIteration):
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError):
                group.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here")


def test_an_evaluation_that_keeps_all_logits_is_told_before_the_memory_of_its_group_is_full(home, tmp_path):
    script, enough = Path(__file__).parent / "scripts" / "kept_logits.py", tmp_path / "enough"
    with memory_group(1400 * 2**20) as group:
        inside = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
        words = [PROGRAM, "run", "--plain", "--", sys.executable, str(script), str(enough)]
        started = subprocess.Popen(
            ["sh", "-c", inside, "sh", *words], env=home.environ, text=True, stdout=subprocess.PIPE
        )
        assert started.stdout is not None
        lines: list[str] = []
        for line in started.stdout:
            lines.append(line)
            if "will be full in" in line:
                enough.touch()
        assert started.wait(480) == 0, "".join(lines)
        wait_until_nothing_is_left(home.newest())
    text = "".join(lines)
    assert enough.exists(), text
    assert text.index("will be full in") < text.index("Keep no logits of an evaluation") < text.index("evaluated")
