"""Findings of real ranks, from the probe over the hub to the recording and ``ftmon status``."""

from pathlib import Path

import start_ranks
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Compiles, DiskSpace, Hello
from ftmon.protocol.messages.wire import Message
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import Ftmon, wait_until_nothing_is_left

SCRIPT = Path(__file__).parent / "scripts" / "health_loop.py"


def played(home: Ftmon, faults: str, *options: str, **environ: str) -> tuple[RunDir, list[Message], str]:
    home.environ |= {"FAULT": faults, **environ}
    job = start_ranks.command(2, str(SCRIPT))
    done = home.run("run", "--plain", *options, "--", *job, seconds=480)
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
    """The latest state of each finding, by kind."""
    return {str(one.evidence["finding"]): one for one in messages if isinstance(one, Alert) and one.kind == "health"}


def test_a_healthy_run_has_known_disks_and_no_finding(home: Ftmon) -> None:
    run, messages, _ = played(home, "", STEPS="60")
    disks = [one for one in messages if isinstance(one, DiskSpace)]
    mine = [one for one in health(messages).values() if one.evidence["finding"] != "disk_filling"]
    assert mine == []
    assert any(str(run.path).startswith(volume.path) or volume.use for volume in disks[0].volumes)
    loaders = [one.loader for one in messages if isinstance(one, Hello) and one.loader is not None]
    assert all(one.workers == 0 and one.cpus >= 1 for one in loaders)


def test_waiting_for_data_nan_and_recompilations_are_told_with_their_figures(home: Ftmon) -> None:
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
