"""The message that a run's own prediction becomes."""

import pytest
from ftmon.trainer.predict.live import _message
from ftmon.trainer.predict.result import Phase, Point, Prediction, Rank


@pytest.mark.parametrize(("peaks", "ranks"), [([9, 9, 9], [0]), ([9, 5, 9], [0, 1, 2]), ([9, 9, 5], [0, 1, 2])])
def test_ranks_that_differ_are_all_in_it(peaks: list[int], ranks: list[int]) -> None:
    every = [Rank(rank, {"backward": Phase(peak, peak)}, 0) for rank, peak in enumerate(peaks)]
    found = Prediction("m", 1, len(every), [Point(64, 1, every, 0, 9)])
    points = _message(found, 1.0).points
    assert [point.rank for point in points] == ranks
    assert [point.phases[0].allocated_peak_bytes for point in points] == [peaks[rank] for rank in ranks]
