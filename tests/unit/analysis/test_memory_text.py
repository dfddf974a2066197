"""Transients, growth and leaks in words."""

import msgspec
from ftmon.protocol.analysis import text
from ftmon.protocol.analysis.findings import Finding
from ftmon.protocol.analysis.memory.facts import GrowthFacts, LeakFacts, SpikeFacts, SteadyFacts

MIB = 2**20
GIB = 2**30
SPIKE = SpikeFacts(
    transient_bytes=931 * MIB,
    usual_bytes=20 * MIB,
    limit_bytes=100 * MIB,
    peak_bytes=40 * GIB,
    capacity_bytes=80 * GIB,
    share_of_capacity=0.01,
    phase_ms=4.0,
    sets_step_peak=True,
    sets_run_peak=True,
    measure="allocated",
    steps=[20],
    repeats=False,
    batch_shape=[],
    largest_bytes=[593 * MIB],
)


def test_a_spike_in_words() -> None:
    said = text.words(Finding("spike", SPIKE, rank=1, ranks=(1,), step=20, phase="optimizer"))
    assert said.title == "rank 1 optimizer +0.9 GiB for 4 ms"
    assert "took 0.91 GiB (1.1% of the device) more than it kept, within 4 ms; usually it is 20.0 MiB" in said.text
    assert "It set the highest peak of the run so far. Not seen before. Common causes: " in said.text
    assert said.text.endswith("Its largest single allocations: 0.58 GiB.")
    again = msgspec.structs.replace(SPIKE, steps=[20, 25], sets_run_peak=False)
    assert (
        "It set the peak of the step. Seen 2 times or more, last in step 25."
        in text.words(Finding("spike", again, rank=1, ranks=(1,), step=25, phase="optimizer")).text
    )


def test_a_transient_of_every_step_in_words() -> None:
    facts = SteadyFacts(GIB, 80 * GIB, 1 / 80, 15.0, 40 * GIB, True, "allocated", 10)
    said = text.words(Finding("steady_transient", facts, ranks=(0, 1), phase="optimizer"))
    assert said.title == "optimizer +1.0 GiB for 15 ms in every step"
    assert "and gives it back: it makes the peak of the step. Common causes: " in said.text


def test_the_growth_of_the_first_optimizer_step_in_words() -> None:
    facts = GrowthFacts(800 * MIB, 400 * MIB, 80 * GIB, {"0": 800 * MIB}, 400 * MIB)
    said = text.words(Finding("state_growth", facts, ranks=(0,), step=1, phase="optimizer"))
    assert said.title == "first optimizer step +0.8 GiB that stays: the optimizer's state"
    assert said.text.endswith("Gradients of 0.39 GiB were freed in the same update.")


def test_a_leak_in_words() -> None:
    facts = LeakFacts(8 * MIB, 9000, 100, 10, 800 * MIB, 9 * GIB, 9 * GIB, 80 * GIB, "allocated", {"0": 8 * MIB}, 0)
    said = text.words(Finding("leak", facts, ranks=(0,)))
    assert said.title == "memory grows by 8.0 MiB a step, full around step 9,000"
    assert "the device is full around step 9,000." in said.text
    ends = text.words(Finding("leak", msgspec.structs.replace(facts, ends_at_step=500, place="loop.py:55 main")))
    assert ends.title.endswith(": loop.py:55 main")
    assert "; the run ends before, at step 500." in ends.text
