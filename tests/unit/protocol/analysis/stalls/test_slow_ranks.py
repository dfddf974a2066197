"""Ranks that others wait for, told before any patience has passed."""

from dataclasses import replace

import pytest
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.evidence import Evidence, Place
from ftmon.protocol.analysis.stalls.slow_ranks import EARLY_S, LONG_S, WaitDetector

AT = Place("", "write_cache", "cache.py:6 in write_cache", line="cache.py:6")
LATE = RankView(1, 41, "forward", 20.0, 300.0, evidence=Evidence(1.0, place=AT, restless=True, work="works"))
WAITING = RankView(0, 41, "backward", 20.0, 8.0, evidence=Evidence(1.0, place=Place("backward", "backward", "a.py:3")))


def told(views: list[RankView], *, is_hang_from: float = 1e9) -> list[tuple[int, str, str]]:
    detector = WaitDetector()
    return [
        (second, found.severity if found.state == "raised" else "", found.state)
        for second in range(80)
        for found in detector.tick(float(second), views, second >= is_hang_from)
    ]


def test_a_rank_that_polls_at_one_line_is_named_early_a_warning_once_it_lasts_until_a_hang_is_judged():
    assert told([WAITING, LATE]) == [(int(EARLY_S), "info", "raised"), (int(LONG_S), "warning", "raised")]
    detector = WaitDetector()
    (found,) = [one for second in range(20) for one in detector.tick(float(second), [WAITING, LATE], False)]
    assert words_of(found).title == "rank 0 waits for rank 1: write_cache in cache.py:6 in write_cache"
    assert words_of(found).text.startswith("Rank 1 has polled at that line for")
    assert told([WAITING, LATE], is_hang_from=30) == [(int(EARLY_S), "info", "raised"), (30, "", "resolved")]


@pytest.mark.parametrize(
    "late",
    [
        replace(LATE, phase="checkpoint"), replace(LATE, evidence=None), replace(LATE, absent="stopped"),
        replace(LATE, step=1, evidence=Evidence(1.0, place=AT)), replace(LATE, finished=True),
    ],
    ids=["saves", "not inspected", "stopped", "prepares", "finished"],
)  # fmt: skip
def test_ordinary_waits_and_those_of_other_findings_are_not_told(late: RankView) -> None:
    assert told([WAITING, late]) == []


def test_a_rank_that_moves_from_line_to_line_is_not_told() -> None:
    detector = WaitDetector()
    for second in range(80):
        place = AT._replace(line=f"cache.py:{second // 10}")
        view = replace(LATE, evidence=Evidence(1.0, place=place, restless=True))
        assert detector.tick(float(second), [WAITING, view], False) == []
