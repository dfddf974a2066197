"""What a search of a sweep runs, and what it says: rows in, a sentence for each combination out."""

from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.analysis.estimates.memory import beside_pytorch
from ftmon.protocol.host.machine import find_gpu
from ftmon.protocol.sweep.rows import PhaseFigures, Predicted, RankRow, Row, Search, Settings
from ftmon.trainer.predict.__main__ import arguments_of
from ftmon.trainer.sweep import plan
from ftmon.trainer.sweep import search as searching
from ftmon.trainer.sweep.search import Predictor

A100 = "NVIDIA A100-SXM4-80GB"
CONFIG = """
model: {config: {model_type: llama, vocab_size: 512, hidden_size: 64}}
data: {path: d.jsonl}
zero: {stage: 2}
run: {ranks: 2}
"""


def asked(name: str, offload: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Return the kind of GPU and the capacity that are asked for on a host with GPUs of a name."""
    gpu = find_gpu(name)
    memory = gpu.memory_bytes if gpu else 8 << 30
    monkeypatch.setattr(searching, "smallest_gpu", lambda: searching.HostGpu(name, memory))
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "s.yaml").write_text("config: train.yaml\naxes: {training.sequence_length: [64, 128]}\n")
    predictor = Predictor(plan.read(str(folder / "s.yaml")), lambda _: None)
    arguments = arguments_of(predictor.words({"zero.offload_optimizer": offload}, [128, 64]))
    assert (arguments.ranks, arguments.sequence_length) == (2, [64, 128])
    return arguments.gpu, memory - arguments.capacity


@pytest.mark.parametrize("offload", [False, True])
def test_a_prediction_is_of_this_hosts_gpus_and_what_is_beside_pytorch_on_them(offload, tmp_path, monkeypatch):
    gpu, beside = asked(A100, offload, tmp_path, monkeypatch)
    assert gpu == A100
    assert beside == round(beside_pytorch(2, offload=offload).value)


def test_of_a_gpu_that_is_not_in_the_table_the_default_is_predicted(tmp_path, monkeypatch):
    assert asked("NVIDIA Voodoo 2", False, tmp_path, monkeypatch)[0] == arguments_of(["--model", "m"]).gpu


GIB, MIB = 1 << 30, 1 << 20
LIMIT = {2: 3_000, 3: 5_000}


class Machine:
    """Runs whose memory follows a rule: the part of a session that a search uses."""

    def __init__(self, crash_at: int = 0) -> None:
        self.ran: list[int] = []
        self.crash_at = crash_at

    def measure(self, settings: Settings, repeat: int = 0, predicted: Predicted | None = None) -> Row:
        seq, stage = settings["seq"], settings.get("zero", 3)
        assert isinstance(seq, int)
        assert isinstance(stage, int)
        self.ran.append(seq)
        if seq == self.crash_at:
            return Row(settings, "crash", 0.0, text="ValueError: no")
        if seq > LIMIT[stage]:
            return Row(settings, "out-of-memory", 0.0, phase="backward", asked_bytes=GIB)
        phases = {"optimizer": PhaseFigures(10 * GIB), "backward": PhaseFigures(8 * GIB + seq * 2 * MIB)}
        return Row(settings, "done", 0.0, ranks=[RankRow(0, 3, phases=phases)])


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("command: torchrun --nproc-per-node {n} t.py {seq}\naxes: {n: [1, 2, 4], seq: [8]}\n", 4),
        (
            "command: torchrun --nproc-per-node 2 --nnodes 2 t.py {seq}\nsearch: {goal: largest, axis: seq, high: 8}\n",
            4,
        ),
        ("command: python t.py {seq}\naxes: {seq: [8]}\n", 1),
        ("config: train.yaml\naxes: {run.ranks: [2, 8], zero.stage: [1, 2]}\n", 8),
        ("config: train.yaml\nset: {run.ranks: 4}\naxes: {zero.stage: [1, 2]}\n", 4),
    ],
)
def test_a_sweep_is_paid_for_the_gpus_of_its_largest_configuration(tmp_path, monkeypatch, text, gpus):
    monkeypatch.chdir(tmp_path)
    for name, content in {"t.py": "", "train.yaml": "run: {ranks: 2}\n", "s.yaml": text}.items():
        (tmp_path / name).write_text(content)
    wanted = plan.read(str(tmp_path / "s.yaml"))
    assert searching.gpus_of(wanted, plan.combinations(wanted)) == gpus


@pytest.fixture
def predictor(tmp_path: Path) -> Predictor:
    path = tmp_path / "s.yaml"
    searched = "search: {goal: largest, axis: seq, high: 8192}\n"
    path.write_text(f"command: python {{seq}} {{zero}}\naxes: {{zero: [2, 3]}}\n{searched}")
    return Predictor(plan.read(str(path)), lambda _: None)


def search(machine: Any, predictor: Predictor, wanted: Search, *stages: int) -> list[str]:
    return searching.search(machine, predictor, wanted, [{"zero": stage} for stage in stages])


def test_the_largest_is_searched_in_each_combination_and_the_phase_s_change_in_few_runs(predictor):
    machine = Machine()
    found = search(machine, predictor, Search("largest", "seq", 8, 8192, 8), 2, 3)
    assert found == ["zero=2: the largest seq that fits is 3,000", "zero=3: the largest seq that fits is 5,000"]
    assert len(machine.ran) < 50, "of 2,048 values"
    machine = Machine()
    (found,) = search(machine, predictor, Search("phases", "seq", 1, 8192), 3)
    assert found.startswith("zero=3: optimizer leads to 1,02")
    assert "then backward at +2.0 MiB a token" in found
    assert len(set(machine.ran)) <= 30


def test_what_does_not_fit_at_all_and_what_cannot_be_told_are_said(predictor):
    assert search(Machine(), predictor, Search("largest", "seq", 6_000, 8192), 3) == ["zero=3: not even seq 6,000 fits"]
    (found,) = search(Machine(), predictor, Search("largest", "seq", 1, 2), 3)
    assert found == "zero=3: the largest seq that fits is 2; larger ones may, too"
    (found,) = search(Machine(crash_at=1), predictor, Search("largest", "seq", 1, 64), 3)
    assert found == "zero=3: cannot tell: seq=1 crash: ValueError: no"
