"""Findings of real ranks, from the probe over the hub to the recording and ``ftmon status``."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import start_ranks
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.health import BatchLoss, Checksum, Compiles, DiskSpace
from ftmon.protocol.messages.telemetry import Hello
from ftmon.protocol.messages.wire import Message
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import Ftmon, ftmon_home, wait_until_nothing_is_left

SCRIPT = Path(__file__).parent / "scripts" / "health_loop.py"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path / "home", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1") as ftmon:
        yield ftmon


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


def test_a_healthy_run_has_equal_replicas_known_disks_and_no_finding(home: Ftmon) -> None:
    run, messages, _ = played(home, "", STEPS="60")
    disks = [one for one in messages if isinstance(one, DiskSpace)]
    mine = [one for one in health(messages).values() if one.evidence["finding"] != "disk_filling"]
    assert mine == []
    sums = [one for one in messages if isinstance(one, Checksum)]
    taken = {(one.step, one.rank) for one in sums}
    # A rank takes none in a step whose memory it is looking at; on a loaded machine those looks come later.
    assert {step for step, _ in taken} <= {10, 20, 30, 40, 50}
    assert any({(step, 0), (step, 1)} <= taken for step in (10, 20, 30, 40, 50))
    assert {part.name for part in sums[0].parameters} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    losses = {(one.step, one.rank): (one.inputs, one.loss) for one in messages if isinstance(one, BatchLoss)}
    steps = {step for step, _ in losses}
    assert steps, "none is taken either while a step's memory is looked at"
    assert steps <= {11, 21, 31, 41, 51}
    both = [step for step in steps if {(step, 0), (step, 1)} <= losses.keys()]
    assert all(losses[step, 0] == losses[step, 1] for step in both), "both ranks have the same rows"
    assert len({given for given, _ in losses.values()}) == len(steps)
    assert any(str(run.path).startswith(volume.path) or volume.use for volume in disks[0].volumes)
    loaders = [one.loader for one in messages if isinstance(one, Hello) and one.loader is not None]
    assert all(one.workers == 0 and one.cpus >= 1 for one in loaders)


def test_diverged_replicas_and_waiting_for_data_are_told_with_their_figures(home: Ftmon) -> None:
    # A rank compares nothing in a step whose memory it looks at: of 110 steps, those of both ranks may leave too few.
    run, messages, output = played(home, "replica,loader,loss", "--no-allocator-events", STEPS="110")
    found = health(messages)
    replicas = found["replica_divergence"]
    assert replicas.severity == "error"
    assert replicas.evidence["parameter"] == "2.bias"
    assert replicas.evidence["first_step"] in range(20, 110, 10), "a busy publisher leaves a checksum out"
    assert "replicas have diverged" in output
    losses = found["unequal_losses"]
    assert losses.evidence["first_step"] in range(21, 110, 10)
    assert {rank for rank, _ in losses.evidence["losses"]} == {0, 1}
    assert losses.evidence["difference"] > 0.05
    assert "the same batch gives different losses" in output
    data = found["input_bound"]
    assert data.evidence["loader"]["workers"] == 0
    assert data.evidence["share"] > 0.25
    assert "workers" in data.evidence["remedy"], "how many would hide it, or that there are too few processors"
    assert "waits for data" in home.run("status", run.id).stdout


def test_nan_names_the_rank_that_had_it_first_and_recompilations_their_reason(home: Ftmon) -> None:
    _, messages, output = played(home, "nan,compile", STEPS="80", AT="15", TORCHDYNAMO_DISABLE="0")
    found = health(messages)
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
    assert "replica_divergence" not in found, "NaN everywhere is no difference"
