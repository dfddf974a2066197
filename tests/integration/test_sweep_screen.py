"""The screen of a sweep: what runs, what failed, what is left, and how it is ended."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.protocol.errors import FtmonError
from ftmon.protocol.host.process import ProcessId, start_ticks
from ftmon.protocol.sweep.rows import Budget, Entry, Started
from ftmon.tui.cli import train
from ftmon.tui.cli.main import parse
from ftmon.tui.model.sweep import SweepModel
from ftmon.tui.screens.sweep import SweepApp
from ftmon.tui.widgets.base import Canvas
from scenes import until
from sweep_results import done, out_of_memory, planned, write_results

GIB = 1 << 30


@pytest.fixture
def worker() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def written(path: Path, process: ProcessId) -> Path:
    """Write four configurations: one done, one out of memory, one under way, one to come."""
    begun = time.time() - 100
    runs = [planned(seq, peak * GIB, fits=peak < 70) for seq, peak in ((512, 10), (1024, 20), (2048, 40), (4096, 80))]
    entries: list[Entry] = [
        Started(begun, {"seq": 512}, run="/a"),
        done(runs[0], begun + 40, 40.0, [{"backward": 10 * GIB}], ms=200.0),
        Started(begun + 40, {"seq": 1024}, run="/b"),
        out_of_memory(1024, begun + 70, 4 * GIB),
        Started(begun + 70, {"seq": 2048}, run="/c"),
    ]
    return write_results(path, "lengths", runs, entries, begun, process, budget=Budget(7200, None, 5, 2), timeout=600)


async def test_the_table_fills_in_beside_time_and_money_left(tmp_path: Path, worker: "subprocess.Popen[bytes]") -> None:
    app = SweepApp(written(tmp_path / "r.jsonl", ProcessId(worker.pid, start_ticks(worker.pid) or 0)))

    def shown() -> str:
        return "\n".join(child.plain for child in app.screen.children if isinstance(child, Canvas))

    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: all(word in shown() for word in ("2 / 4 done", "4,096", "peak by seq")), "the sweep")
        text, main = shown(), app.screen
        lines = text.splitlines()
        assert any("lengths: seq=2,048" in line and "2 / 4 done" in line and "running" in line for line in lines)
        assert any("1 out of memory" in line for line in lines)
        left = re.search(r"left \(([\d.]+)", text)
        assert 18 < float(left[1]) < 19.73, "20.00 less 100 s, and what the test took, at 10.00 an hour"
        assert any("512" in line and "10.00 GiB" in line and "+0.0%" in line and "200.0" in line for line in lines)
        assert any("1,024" in line and "out of memory in backward, rank 1: asked for 4.00" in line for line in lines)
        assert any("2,048" in line and "40.00 GiB" in line and "running" in line for line in lines)
        assert any("4,096" in line and "80.00 GiB too much" in line for line in lines)
        assert "peak by seq" in text
        await pilot.press("question_mark")
        await until(pilot, lambda: app.screen is not main, "the help")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is main, "the sweep again")
        await pilot.press("S")
        await until(pilot, lambda: worker.poll() is not None, "the end of the sweep's process")
        assert worker.returncode != 0, "S interrupts the sweep's process"


def test_a_sweep_whose_process_is_gone_is_killed_and_a_refused_one_leaves_earlier_results(tmp_path):
    model = SweepModel(written(tmp_path / "r.jsonl", ProcessId(1, 1)))
    assert model.refresh()
    assert not model.refresh(), "nothing was added"
    assert model.state == "killed"
    assert [row.verdict for row in model.table(time.time())] == ["done", "out-of-memory", "planned", "planned"]
    assert model.used_seconds(time.time()) == pytest.approx(70, abs=0.1), "until its last entry"
    path = written(tmp_path / "rows.log", ProcessId(1, 1))
    before = path.read_bytes()
    with pytest.raises(FtmonError):
        train._start(path, parse(["sweep", str(tmp_path / "missing.yaml"), "--output", str(path)]))
    assert path.read_bytes() == before
