"""What ends a job before its first step is named: a master port that is taken, a failed CUDA allocation."""

import os
import socket
import sys
from pathlib import Path

import start_ranks
from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.recording.reader import Reader
from ftmon_process import Ftmon, lines_with, wait_until_nothing_is_left
from ports import free_port

SCRIPT = Path(__file__).parent / "scripts" / "short_loop.py"


def torchrun(port: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", str(port)]


def test_a_master_port_that_is_taken_is_named_with_who_holds_it(home: Ftmon) -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        port = server.getsockname()[1]
        done = home.run("run", "--plain", "--", *torchrun(port), str(SCRIPT), "1", "1", "ok", seconds=480)
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_with(done.stdout, ["failure:", f"port {port} is taken by", f"pid {os.getpid()}"]), done.stdout
    assert lines_with(done.stdout, ["why:", f"port {port} is taken"])
    assert not lines_with(done.stdout, ["ended before its first step"]), "it is said once"
    told = home.status(home.newest().id)
    alert = next(alert for alert in told["alerts"] if "is taken" in alert["title"])
    assert alert["evidence"]["pid"] == os.getpid()
    assert "--master_port" in alert["text"]


def test_a_script_that_is_missing_or_gives_up_is_named_with_its_own_words(home: Ftmon, tmp_path: Path) -> None:
    missing = home.run("run", "--plain", "--", *start_ranks.command(1, tmp_path / "trian.py"))
    assert missing.returncode == 1, missing.stdout + missing.stderr
    assert lines_with(missing.stdout, ["why:", "can't open file", "trian.py'"]), missing.stdout
    (tmp_path / "gives_up.py").write_text("raise SystemExit('no data at /nowhere')\n")
    gave_up = home.run("run", "--plain", "--", *start_ranks.command(1, tmp_path / "gives_up.py"))
    assert lines_with(gave_up.stdout, ["why:", "the last line that rank 0 wrote: no data at /nowhere"]), gave_up.stdout


def test_a_failed_cuda_allocation_before_the_first_step_has_its_report(home: Ftmon) -> None:
    done = home.run("run", "--plain", "--", *torchrun(free_port()), str(SCRIPT), "1", "1", "oom", seconds=480)
    assert done.returncode == 1, done.stdout + done.stderr
    assert lines_with(done.stdout, ["oom: rank 0 out of memory", "20.00 GiB", "3.25 GiB free"]), done.stdout
    wait_until_nothing_is_left(home.newest())  # the hub has recorded the end
    with Reader(home.newest().recording) as reader:
        frames = reader.frames(0, 10_000)
    reports = [frame.message for frame in frames if isinstance(frame.message, OomReport)]
    assert len(reports) == 1
    oom = reports[0].oom
    assert oom.requested_bytes == 20 * 2**30
    assert oom.measure == "cuda"
    assert (oom.allocated_bytes, oom.step) == (int(70.10 * 2**30), 1)
    assert any("short_loop.py" in frame for frame in oom.stack)
