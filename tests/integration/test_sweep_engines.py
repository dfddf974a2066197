"""Jobs of a sweep on a Ray cluster of two nodes, and by submitit: a lost one is a row that runs again."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from eventually import eventually
from ftmon.protocol.sweep.rows import Results, Row, Started, read
from ftmon_process import Ftmon, wait_until_nothing_is_left

RANK = Path(__file__).parent / "scripts" / "fake_rank.py"
DONE: dict[str, Any] = {"steps": 6}
CRASHES = {"steps": 5, "exit": 3}


class Waiting:
    """A sweep of pretended ranks that wait for a file before their last step, beside others."""

    def __init__(self, folder: Path, *others: dict[str, Any], waiting: int) -> None:
        self.go = folder / "go"
        self.file, self.results = folder / "s.yaml", folder / "s.results.jsonl"
        # The same file by several names, as each configuration is one run.
        waits = [DONE | {"awaits": f"{folder}{'/.' * number}/go"} for number in range(waiting)]
        self.file.write_text(
            f"command: {json.dumps([sys.executable, str(RANK), '{what}'])}\n"
            f"axes: {{what: {json.dumps([json.dumps(one) for one in (*others, *waits)])}}}\n"
            "steps: 4\nwarm_up: 2\nhang_grace: 10 m\n"
        )

    def read(self) -> Results | None:
        return read(self.results) if self.results.exists() and self.results.stat().st_size else None

    def until(self, reached: Callable[[Results], Any], what: str) -> Any:
        return eventually(lambda: (found := self.read()) and reached(found), what, 400, every=0.2)

    def verdicts(self) -> set[str]:
        found = self.read()
        return set() if found is None else {row.verdict for row in found.answered().values()}


def waits(home: Ftmon, runs: int) -> Callable[[Results], bool]:
    def reached(_results: Results) -> bool:
        found = [run for run in home.runs() if (run.path / "recording.sqlite").exists() and run.read_exit() is None]
        return sum(steps(run.recording) >= 5 for run in found) >= runs

    return reached


def steps(recording: Path) -> int:
    from ftmon.protocol.errors import RecordingError
    from ftmon.protocol.recording.reader import Reader

    try:
        with Reader(recording) as reader:
            return reader.info().last_step
    except RecordingError:
        return 0


def unfinished(results: Results) -> list[Row]:
    return [entry for entry in results.entries if isinstance(entry, Row) and entry.verdict == "unfinished"]


def test_a_killed_job_runs_again_and_a_killed_sweep_takes_the_rows_of_its_jobs(home: Ftmon, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    sweep = Waiting(tmp_path, DONE, CRASHES, waiting=1)
    with home.start("sweep", str(sweep.file), "--on", "submitit", "--plain") as process:
        sweep.until(lambda found: len(found.rows) == 2, "the rows of two jobs")
        sweep.until(waits(home, 1), "the third job waiting")
        (started,) = sweep.read().unanswered
        for one in psutil.Process(int(started.job)).children():  # the job itself, as a node that fails
            one.kill()
        sweep.until(unfinished, "the row of the killed job")
        sweep.until(waits(home, 1), "the job, submitted again")
        os.kill(process.pid, signal.SIGKILL)
    (again,) = sweep.read().unanswered
    assert again.job != started.job
    sweep.go.touch()  # the job outlives its sweep, and leaves its row
    eventually(lambda: (tmp_path / "s.jobs" / f"{again.job}_0_result.pkl").exists(), "the job's result", 400)
    done = home.run("sweep", str(sweep.file), "--on", "submitit", "--plain", seconds=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 runs have their rows already" in done.stdout
    assert sweep.verdicts() == {"done", "crash"}
    assert len(home.runs()) == 4, "no run is repeated but the killed one"
    for run in home.runs():
        wait_until_nothing_is_left(run)


def test_an_interrupted_sweep_ends_its_jobs(home: Ftmon, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    sweep = Waiting(tmp_path, waiting=1)
    with home.start("sweep", str(sweep.file), "--on", "submitit", "--plain") as process:
        sweep.until(waits(home, 1), "the job waiting")
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=200)
        assert process.returncode == 130, output
    assert [row.text for row in unfinished(sweep.read())] == ["the sweep ended"]
    wait_until_nothing_is_left(home.newest())


@pytest.fixture
def cluster(home: Ftmon) -> Iterator[Any]:
    """Start two Ray nodes of one CPU each."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    made.wait_for_nodes()
    home.environ["RAY_ADDRESS"] = made.address
    yield made
    made.shutdown()


@pytest.mark.timeout(900)
def test_a_job_of_a_lost_node_runs_again_on_another(home: Ftmon, tmp_path: Path, cluster: Any) -> None:
    sweep = Waiting(tmp_path, waiting=2)
    with home.start("sweep", str(sweep.file), "--on", "ray", "--plain") as process:
        sweep.until(waits(home, 2), "a job waiting on each node")
        (other,) = cluster.worker_nodes
        cluster.remove_node(other, allow_graceful=False)
        (lost,) = sweep.until(unfinished, "the row of the lost job")
        sweep.go.touch()
        output = process.communicate(timeout=400)
        assert process.returncode == 0, output
    results = sweep.read()
    assert sweep.verdicts() == {"done"}
    started = [entry.settings for entry in results.entries if isinstance(entry, Started)]
    seen = [started.count(row.settings) for row in results.rows]
    assert seen == [1 + (row.settings == lost.settings) for row in results.rows]
    for run in home.runs():
        wait_until_nothing_is_left(run)


def test_what_no_node_can_run_is_refused_in_a_line(home: Ftmon, tmp_path: Path, cluster: Any) -> None:
    sweep = Waiting(tmp_path, DONE, waiting=0)
    done = home.run("sweep", str(sweep.file), "--on", "ray", "--gpus", "2", "--plain", seconds=200)
    assert done.returncode == 2
    assert done.stderr.strip() == "ftmon: --on ray: a job needs 2 GPUs of one node, and the largest has 0"
