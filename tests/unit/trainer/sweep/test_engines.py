"""Jobs of a sweep take GPUs that no other job has, check their number, and refuse what differs on their host."""

import json
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.sweep.rows import FORMAT, Header, Results, Row, Started
from ftmon.trainer.sweep import engines, plan
from ftmon.trainer.sweep.__main__ import main
from ftmon.trainer.sweep.engines import Request, work

SWEEP = "command: python {seq}\naxes: {seq: [8, 16]}\n"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a sweep file, with a home of its own; what a job changes in this process is undone."""
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "s.yaml"
    path.write_text(SWEEP)
    return path


def request(sweep: Path, gpus: int, **more: object) -> Request:
    fingerprint = plan.fingerprint(plan.read(str(sweep)))
    fixed = str(sweep), str(sweep.parent), fingerprint, {"seq": 8}, 0, None, "s-001", gpus
    return msgspec.structs.replace(Request(*fixed, {"FTMON_HOME": str(sweep.parent / "home")}), **more)


@pytest.mark.parametrize("takes_gpus", [False, True])
def test_a_job_with_another_number_of_gpus_is_refused(sweep: Path, monkeypatch, takes_gpus: bool) -> None:
    monkeypatch.setattr(engines, "usable_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    asked = request(sweep, 4, takes_gpus=takes_gpus, visible="0,1,2")
    row = msgspec.json.decode(work(msgspec.json.encode(asked)), type=Row)
    assert (row.verdict, row.settings) == ("refused", {"seq": 8})
    assert row.text == "the job needs 4 GPUs and has 3 (CUDA_VISIBLE_DEVICES: 0,1,2)"


def test_a_job_whose_sweep_file_differs_is_refused_and_one_on_the_cpu_sees_no_gpu(sweep):
    asked = request(sweep, 0)
    sweep.write_text(SWEEP + "steps: 9\n")
    row = msgspec.json.decode(work(msgspec.json.encode(asked)), type=Row)
    assert row.verdict == "refused"
    assert "has changed since the sweep began, or differs on this host" in row.text
    with engines._gpus_for(request(sweep, 0)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_jobs_of_a_host_take_different_gpus_and_wait_for_free_ones(sweep: Path, monkeypatch) -> None:
    def visible() -> list[str]:
        return [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2").split(",") if one]

    monkeypatch.setattr(engines, "usable_gpus", visible)
    monkeypatch.setattr(engines, "_POLL_SECONDS", 0.01)
    one, two = (request(sweep, gpus, takes_gpus=True) for gpus in (1, 2))
    begun, got = threading.Event(), threading.Event()
    seen: list[str] = []

    def third() -> None:
        begun.set()
        with engines._gpus_for(two):
            seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
            got.set()

    with engines._gpus_for(two):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
        with engines._gpus_for(one):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
            waiting = threading.Thread(target=third)
            waiting.start()
            assert begun.wait(60)
        assert not got.wait(0.3), "one GPU is free, and it needs two"
    assert got.wait(60)
    waiting.join(60)
    assert len(seen[0].split(",")) == 2


def test_starts_without_a_row_are_unanswered(tmp_path: Path) -> None:
    starts = [Started(1.0, {"seq": seq}, job=str(seq)) for seq in (8, 16, 32)]
    again = Started(4.0, {"seq": 8}, job="9")
    entries = [*starts, Row({"seq": 8}, "unfinished", 2.0), Row({"seq": 32}, "done", 3.0), again]
    found = Results(Header(FORMAT, "s", "", "", ["seq"], 3, 2, 0.0), entries, 0)
    assert {one.job for one in found.unanswered} == {"16", "9"}


@pytest.mark.parametrize(
    ("name", "missing", "line"),
    [
        ("slurm", "submitit", "--on needs the package submitit; run: pip install 'ftmon[slurm]'"),
        ("ray", "ray", "--on needs the package ray; run: pip install 'ftmon[ray]'"),
        ("slurm", "", "--on slurm: no srun in PATH; run the sweep where jobs are submitted"),
    ],
)
def test_an_engine_that_is_not_there_is_one_line(sweep, monkeypatch, capsys, name, missing, line) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main() handles signals of this process
    monkeypatch.setenv("PATH", "")
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    else:
        pytest.importorskip("submitit")
    sweep.write_text(SWEEP.replace("python {seq}", f"[{json.dumps(sys.executable)}, '{{seq}}']"))
    assert main([str(sweep), "--on", name, "--gpus", "0"]) == 2
    assert capsys.readouterr().err == f"ftmon: {line}\n"
    assert [path.name for path in sweep.parent.iterdir()] == ["s.yaml"]


def test_lengths_of_one_process_stay_on_this_host(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = tmp_path / "s.yaml"
    wanted = plan.read(str(_written(path)))._replace(one_process=True)
    monkeypatch.setattr(plan, "read", lambda _path: wanted)
    assert main([str(path), "--on", "submitit"]) == 2
    assert "--on submitit: one_process is for this host" in capsys.readouterr().err


def _written(path: Path) -> Path:
    path.write_text(SWEEP.replace("python {seq}", f"[{json.dumps(sys.executable)}, '{{seq}}']"))
    return path
