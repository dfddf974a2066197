"""Transients, growth and leaks in words."""

from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.memory.causes import (
    GrowthFacts,
    LeakFacts,
    NumbersCause,
    SpikeFacts,
    StackCause,
    SteadyFacts,
    name_cause,
)
from ftmon.protocol.analysis.remedies import remedy_of
from ftmon.protocol.analysis.words import Words
from ftmon.protocol.messages.memory import Cause
from ftmon.protocol.messages.telemetry import StackGroup
from msgspec.structs import replace

MIB = 2**20
GIB = 2**30
ADAM = "/opt/venv/lib/python3.12/site-packages/torch/optim/adam.py:640 _multi_tensor_adam"
FIGURES = (931 * MIB, 20 * MIB, 100 * MIB, 40 * GIB, 80 * GIB, 0.01, 4.0)
SPIKE = SpikeFacts(*FIGURES, True, True, "allocated", [20], False, [], largest_bytes=[593 * MIB])


def said_of(kind: str, facts: Any, **fields: Any) -> Words:
    return kinds.words_of(Finding(kind, facts, phase="" if kind == "leak" else "optimizer", **fields))


def test_a_spike_in_words_and_one_whose_stacks_name_the_cause():
    said = said_of("spike", SPIKE, rank=1, step=20)
    assert said.title == "rank 1 optimizer +0.9 GiB for 4 ms"
    assert "took 0.91 GiB (1.1% of the device) more than it kept, within 4 ms; usually it is 20.0 MiB" in said.text
    assert "It set the highest peak of the run so far. Not seen before. Common causes: " in said.text
    assert said.text.endswith("Its largest single allocations: 0.58 GiB.")
    again = said_of("spike", replace(SPIKE, steps=[20, 25], sets_run_peak=False), rank=1, step=25)
    assert "It set the peak of the step. Seen 2 times or more, last in step 25." in again.text
    found = cause(950 * MIB, ["loop.py:31 main", ADAM])
    named = name_cause(found, 8192)
    said = explained(StackCause(found, named, remedy_of(named.pattern, named.parts[0].bytes, None)))
    assert said.title == "rank 0 optimizer +0.9 GiB for 4 ms: foreach temporaries of the optimizer"
    assert "Common causes" not in said.text
    assert (
        "Cause, by the stacks of step 22: 0.89 GiB of 0.93 GiB in adam.py:640 _multi_tensor_adam: foreach temporaries "
        "of the optimizer, one parameter-size. Try: torch.optim.AdamW(..., fused=True) needs none, which would save "
        "0.89 GiB."
    ) in said.text
    assert "took 12 ms in place of 9 ms, and reading them 31 ms in the background" in said.text


def cause(transient: int, frames: list[str]) -> Cause:
    groups = [StackGroup(transient - 40 * MIB, 3, frames, 200 * MIB), StackGroup(40 * MIB, 9, ["loop.py:9 step"])]
    times = {"armed_us": 12_000, "usual_us": 9000, "read_us": 31_000}
    return Cause(0, 22, "optimizer", 0.0, "spike", transient, groups, parameter_bytes=910 * MIB, **times)


def explained(*causes: NumbersCause | StackCause) -> Words:
    return said_of("spike", replace(SPIKE, causes=causes), rank=0, step=20)


def test_stacks_that_name_no_cause_a_transient_of_every_step_and_the_growth_of_the_first_one_in_words():
    other = explained(StackCause(cause(50 * MIB, [ADAM])))
    assert "Cannot tell the cause: step 22, whose stacks were recorded, took 50.0 MiB only." in other.text
    unknown = cause(950 * MIB, ["/home/user/loop.py:31 main"])
    place = explained(StackCause(unknown, name_cause(unknown, 8192)))
    assert "Cannot tell the cause by the stacks of step 22; most of it, 0.93 GiB, in loop.py:31 main." in place.text
    facts = SteadyFacts(GIB, 80 * GIB, 1 / 80, 15.0, 40 * GIB, True, "allocated", 10)
    said = said_of("steady_transient", facts)
    assert said.title == "optimizer +1.0 GiB for 15 ms in every step"
    assert "and gives it back: it makes the peak of the step. Common causes: " in said.text
    assert "the copy of the gradients" in said_of("steady_transient", replace(facts, zero_stage=2)).text
    said = said_of("state_growth", GrowthFacts(800 * MIB, 400 * MIB, 80 * GIB, {"0": 800 * MIB}, 400 * MIB))
    assert said.title == "first optimizer step +0.8 GiB that stays: the optimizer's state"
    assert said.text.endswith("Gradients of 0.39 GiB were freed in the same update.")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("longer_batch", "[4, 4096] was longer than any before ([4, 2048]"),
        ("loss_scale_overflow", "the loss scaler skipped this update"),
        ("checkpoint_saving", "a checkpoint was being saved"),
    ],
)
def test_a_cause_that_the_step_itself_names_in_words(pattern: str, words: str) -> None:
    said = explained(NumbersCause(pattern, remedy_of(pattern, 900 * MIB, None), [4, 4096], [4, 2048]))
    assert words in said.text
    assert "Try: " in said.text


def test_a_leak_in_words() -> None:
    facts = LeakFacts(8 * MIB, 9000, 100, 10, 800 * MIB, 9 * GIB, 9 * GIB, 80 * GIB, "allocated", {"0": 8 * MIB}, 0)
    said = said_of("leak", facts)
    assert said.title == "memory grows by 8.0 MiB a step, full around step 9,000"
    assert "the device is full around step 9,000." in said.text
    ends = said_of("leak", replace(facts, ends_at_step=500, place="loop.py:55 main"))
    assert ends.title.endswith(": loop.py:55 main")
    assert "; the run ends before, at step 500." in ends.text
    groups = [StackGroup(16 * MIB, 2, ["/home/user/loop.py:55 main"], 8 * MIB, 16 * MIB)]
    stacks = Cause(0, 103, "", 0.0, "leak", 16 * MIB, groups, armed_us=70_000, usual_us=55_000, read_us=20_000)
    placed = said_of("leak", replace(facts, cause=stacks)).text
    assert "16.0 MiB in 2 blocks of loop.py:55 main" in placed
    assert "the step took 70 ms in place of 55 ms" in placed
