"""The jobs of a run on screen."""

from ftmon.protocol.messages.hosts import Job, JobPhase, JobRank
from ftmon.tui.model.runs import job_rows
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.tables import detail_lines


def details(*ranks: JobRank) -> list[str]:
    (row,) = job_rows({1: Job(1, 5.0, "failed", 0.0, 5.0, ranks=list(ranks))}, 5.0)
    return [line.plain for line in detail_lines(row, [], 100, Theme())]


def test_the_end_of_each_rank_is_named_alike_with_and_without_steps() -> None:
    killed, exited = JobRank(0, 7, 1, state="gone", signal=9), JobRank(1, 8, 1, state="gone", exit_code=1)
    expected = " rank 0 killed by SIGKILL, rank 1 exit code 1, rank 2 gone"
    assert details(killed, exited, JobRank(2, 9, 1, state="gone"))[-1] == expected
    stepped = JobRank(0, 7, 1, steps=1, state="gone", signal=9, phases=[JobPhase("forward", 8, 8, 1)])
    assert details(stepped)[-1].endswith(" SIGKILL")
