"""The table of known faults, and runs that have one."""

import pytest
from ftmon.protocol.analysis.kinds import words_of
from ftmon.protocol.analysis.learning.known import KnownFaults
from ftmon.protocol.checks import KnownFault, known_faults
from ftmon.protocol.messages.telemetry import Hello
from simulated_run import Sim


@pytest.mark.parametrize(
    ("version", "has"), [("0.17.5", False), ("0.17.6", True), ("0.19.3+cpu", True), ("0.19.4", False), ("1.0", False)]
)
def test_a_row_is_of_its_versions(version: str, has: bool) -> None:
    assert KnownFault("deepspeed", "", "", "", "0.17.6", "0.19.4").has(version) == has


def test_every_known_fault_says_what_is_wrong_and_a_run_is_told_once_of_those_it_has():
    for fault in known_faults():
        assert fault.what
        assert fault.remedy
        assert fault.thread.startswith("https://github.com/")
        assert fault.when.keys() <= set(Hello.__struct_fields__)

    def hello(stage: int, precision: str, rank: int = 0) -> Hello:
        return Sim(2).hello(rank, zero_stage=stage, precision=precision, versions={"deepspeed": "0.19.8"})

    detector = KnownFaults()
    (found,) = detector.hello(hello(0, "bf16"))
    assert found.severity == "info"
    assert words_of(found).title.startswith("deepspeed 0.19.8: the optimizer is stepped once when the engine is made")
    assert detector.hello(hello(0, "bf16", 1)) == []
    assert KnownFaults().hello(hello(0, "fp32")) == KnownFaults().hello(hello(3, "bf16")) == []
