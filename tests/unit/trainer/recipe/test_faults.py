"""How a fault is asked for, and how much a slow rank is slowed."""

import select
import time
from types import SimpleNamespace
from typing import Any

import pytest
from ftmon.protocol.errors import UsageError
from ftmon.trainer.recipe.faults import DEFAULT_STEP, KINDS, Fault, FaultMaker, parse


@pytest.mark.parametrize("kind", KINDS)
def test_rank_and_step_are_given_in_any_order_or_the_last_and_the_default(kind: str) -> None:
    assert parse(kind, 4) == Fault(kind, 3, DEFAULT_STEP)  # type: ignore[arg-type]
    assert parse(f"{kind}:rank=0,step=7", 2) == parse(f"{kind}:step=7,rank=0", 2) == Fault(kind, 0, 7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must be spike, hang, slow, oom, crash or stop"), ("melt", "not 'melt'"),
        ("hang:rank", "of the form hang:rank=R,step=S"), ("hang:rank=-1", "of the form"),
        ("hang:rank=²", "of the form"), ("hang:node=1", "of the form"),
        ("hang:rank=2", "names rank 2, but the ranks are 0 to 1"), ("hang:step=0", "steps count from 1"),
    ],
)  # fmt: skip
def test_anything_else_is_refused_with_one_clear_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text, 2)
    assert words in str(raised.value)


def test_a_slow_rank_s_steps_do_not_grow_and_one_that_hangs_waits_once_from_its_step_on(monkeypatch):
    world: Any = SimpleNamespace(rank=0, size=1, on_gpu=False)
    faults = FaultMaker(Fault("slow", 0, 8), world, engine=None)
    durations: list[float] = []
    for step in range(1, 21):
        began = time.perf_counter()
        faults.begin(step)
        for _ in range(4):
            faults.in_data()
            time.sleep(0.005)
        durations.append(time.perf_counter() - began)
    usual, slow = sorted(durations[2:7])[2], sorted(durations[-5:])[2]
    assert 2 * usual < slow < 4 * usual
    world: Any = SimpleNamespace(rank=1, size=2, on_gpu=False)
    faults = FaultMaker(Fault("hang", 1, 3), world, engine=None)
    waited: list[int] = []
    monkeypatch.setattr(select, "select", lambda *_: waited.append(step))
    for step in range(1, 6):
        faults.begin(step)
        faults.in_data()
    assert waited == [3]
