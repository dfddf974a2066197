"""What the peaks of a real rank consist of, where it computes on the CPU."""

import pytest
from ftmon.protocol.messages.control import Result
from ftmon.protocol.messages.memory import Composition
from ftmon.protocol.messages.telemetry import Hello, Step
from probe_collector import alone

NUMBERS = 1000 * 512 + 6 * (512 * 512 + 512)
"""Parameters of the script's model."""


@pytest.mark.parametrize("stage", [2, 3])
def test_a_deepspeed_rank_s_resident_peaks_are_composed_at_first_and_on_request(collector, stage):
    collector.fork("composed_engine.py", stage, 1000, **alone())
    collector.collect(lambda c: any(found.step > 1 for found in c.of(Composition)), 300)
    hello = collector.of(Hello)[-1]
    asked = collector.command(f"rank-0-{hello.pid}-{hello.start_ticks}", "compose", reason="spike")
    collector.collect(lambda c: any(isinstance(answer, Result) and answer.id == asked for answer in c.answers))
    (answer,) = [answer for answer in collector.answers if isinstance(answer, Result)]
    assert answer.ok, answer.text
    collector.collect(lambda c: any(found.reason == "spike" for found in c.of(Composition)))
    steps = {step.step: step for step in collector.of(Step)}
    for composition in collector.of(Composition):
        assert composition.measure == "glibc"
        assert composition.note.startswith("the CPU has no trace of allocations")
        for phase in composition.phases:
            assert sum(phase.parts.values()) == phase.peak_bytes
            if composition.step in steps:
                assert phase.peak_bytes == steps[composition.step].phase(phase.name).resident.peak
    last = collector.of(Composition)[-1]
    assert f"step {last.step}" == answer.text
    assert last.known["parameters"] == pytest.approx(2 * NUMBERS, rel=0.001)
    assert last.known["master_copies"] == pytest.approx(4 * NUMBERS, rel=0.001)
    assert last.known["optimizer_states"] == pytest.approx(8 * NUMBERS, rel=0.001)
    parts = {phase.name: phase.parts for phase in last.phases}
    assert parts["forward"]["activations"] > 6 * 2 * 2 * 512 * 512 * 0.9, "two half-precision tensors a layer"
    assert parts["optimizer"]["gradients"] == pytest.approx(2 * NUMBERS, rel=0.1)
    if stage == 3:
        assert parts["backward"]["buckets"] > 10**6
    log = collector.run.logs / "probe.log"
    assert not log.exists(), log.read_text()
