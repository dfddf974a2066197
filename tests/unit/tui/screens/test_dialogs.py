"""Which ranks a kill is offered for."""

import pytest
from ftmon.protocol.messages.control import Alert, RankState, RankStateName
from ftmon.protocol.messages.hosts import Job
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.model import RunModel
from ftmon.tui.screens.dialogs import Targets, launcher_that_ends_all, suggested, target_line
from ftmon.tui.widgets.drawing import Theme
from ftmon.tui.widgets.state import stalled_seconds
from models import folded
from streams import Stream

NOW = 1_780_000_200.0
STUCK = ("hung", "stopped", "unreachable")


def of(states: dict[int, RankStateName], ranks: int = 4) -> RunModel:
    model = folded(Stream(ranks=ranks, steps=4, finished=False).frames())
    for rank, state in states.items():
        model.apply(Frame(model.last_seq + 1, NOW, RankState(rank, state, NOW, since=NOW - 34, pid=1)))
    return model


def alert(rank: int | None = None, ranks: list[int] | None = None, resolved: float | None = None) -> Alert:
    return Alert(
        id=1, kind="hang", severity="error", time=NOW, title="a hang", rank=rank, ranks=ranks or [], resolved=resolved
    )


TWO_HUNG, HUNG_AND_STOPPED = {1: "hung", 3: "hung"}, {1: "hung", 3: "stopped"}


@pytest.mark.parametrize(
    ("states", "cursor", "selected", "offered"),
    [
        ({}, 2, None, {2}),
        *(({0: "waiting", 1: "waiting", 2: "waiting", 3: state}, 0, None, {3}) for state in STUCK),
        (TWO_HUNG, 0, None, {1, 3}),
        (TWO_HUNG, 1, None, {1}),
        (HUNG_AND_STOPPED, 0, alert(3), {3}),
        (HUNG_AND_STOPPED, 0, alert(ranks=[0, 1]), {1}),
        ({}, 0, alert(2), {2}),
        ({}, 0, alert(2, resolved=NOW), {0}),
        ({}, 0, alert(), {0}),
    ],
)
def test_the_rank_of_the_alert_else_stuck_ranks_else_that_at_the_cursor_is_offered(states, cursor, selected, offered):
    assert suggested(of(states), cursor, selected) == offered


def test_when_every_rank_is_stuck_the_run_is_offered_and_one_of_no_later_job_is_drawn_as_ended():
    model = of({0: "hung", 1: "hung"}, ranks=2)
    targets = Targets.of(model, suggested(model, 0))
    assert targets.whole
    assert targets.chosen == []
    model = of({})
    targets = Targets.of(model, {3})
    model.apply(Frame(model.last_seq + 1, NOW, Job(1, NOW, "training", NOW, world_size=4)))
    model.apply(Frame(model.last_seq + 1, NOW, Job(2, NOW, "training", NOW, world_size=2)))
    lines = [target_line(targets, row, model, 78, Theme(), False).plain for row in range(5)]
    assert ["has ended" in line for line in lines] == [False, False, False, True, True]
    model = of({}, ranks=1)
    assert ": 1 rank, " in target_line(Targets.of(model, {0}), 0, model, 78, Theme(), False).plain
    assert stalled_seconds(of({})) is None
    assert stalled_seconds(of({0: "waiting", 3: "hung"})) == 34


@pytest.mark.parametrize(
    ("command", "framework", "launcher"),
    [
        (["/usr/bin/torchrun", "--nproc-per-node", "4", "train.py"], "ddp", "torchrun"),
        (["python", "-m", "torch.distributed.run", "train.py"], "", "torchrun"),
        (["accelerate", "launch", "train.py"], "ddp", "accelerate"),
        (["deepspeed", "train.py"], "deepspeed", "DeepSpeed's launcher"),
        (["python", "spawns.py"], "ddp", ""),
    ],
)
def test_the_whole_run_is_offered_where_one_death_ends_it(command, framework, launcher) -> None:
    model = of({3: "hung"})
    model.info.command, model.info.framework = command, framework
    assert launcher_that_ends_all(model) == launcher
    targets = Targets.of(model, {3})
    assert targets.whole is bool(launcher)
    targets.marked, targets.whole = set(), True
    targets.toggle(targets.ranks.index(3) + 1)
    assert targets.chosen == [3], "a single rank can still be chosen"
