"""What a search of a sweep runs, and what it says: rows in, a sentence for each combination out."""

from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.sweep.rows import PhaseFigures, Predicted, RankRow, Row, Search, Settings
from ftmon.trainer.sweep import plan
from ftmon.trainer.sweep import search as searching
from ftmon.trainer.sweep.search import Predictor

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


@pytest.fixture
def predictor(tmp_path: Path) -> Predictor:
    path = tmp_path / "s.yaml"
    path.write_text(
        "command: python {seq} {zero}\naxes: {zero: [2, 3]}\nsearch: {goal: largest, axis: seq, high: 8192}\n"
    )
    return Predictor(plan.read(str(path)), lambda _: None)


def search(machine: Any, predictor: Predictor, wanted: Search, *stages: int) -> list[str]:
    return searching.search(machine, predictor, wanted, [{"zero": stage} for stage in stages])


def test_the_largest_is_searched_for_in_each_combination(predictor: Predictor) -> None:
    machine = Machine()
    found = search(machine, predictor, Search("largest", "seq", 8, 8192, 8), 2, 3)
    assert found == ["zero=2: the largest seq that fits is 3,000", "zero=3: the largest seq that fits is 5,000"]
    assert len(machine.ran) < 50, "of 2,048 values"


def test_where_the_phase_changes_takes_few_of_the_runs_of_a_grid(predictor: Predictor) -> None:
    machine = Machine()
    (found,) = search(machine, predictor, Search("phases", "seq", 1, 8192), 3)
    assert found.startswith("zero=3: optimizer leads to 1,02")
    assert "then backward at +2.0 MiB a token" in found
    assert len(set(machine.ran)) <= 30


def test_what_does_not_fit_at_all_and_what_cannot_be_told_are_said(predictor: Predictor) -> None:
    assert search(Machine(), predictor, Search("largest", "seq", 6_000, 8192), 3) == ["zero=3: not even seq 6,000 fits"]
    assert search(Machine(), predictor, Search("largest", "seq", 1, 2), 3) == [
        "zero=3: the largest seq that fits is 2; larger ones may, too"
    ]
    (found,) = search(Machine(crash_at=1), predictor, Search("largest", "seq", 1, 64), 3)
    assert found == "zero=3: cannot tell: seq=1 crash: ValueError: no"
