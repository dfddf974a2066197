"""GPUs: throttling, memory errors, XIDs, as NVML and the driver's log report them; checkpoints that failed."""

from typing import Any

import pytest
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.health.machine import CheckpointFacts, Checkpoints, Gpus, XidFacts
from ftmon.protocol.messages.telemetry import Checkpoint, CheckpointFailed, DeviceHealth, DeviceSample, Xid
from ftmon.trainer.host.hardware.gpus import Xids, read_xid

FULL = "No space left on device"


def test_failed_checkpoints_are_one_error_that_counts_them_and_the_next_complete_one_resolves():
    judge = Checkpoints()

    def fail(step: int, kept: str = "") -> Finding:
        (found,) = judge.failed(CheckpointFailed(0, step, float(step), f"out/step-{step}", FULL, kept))
        return found

    found = fail(20, "out/step-10")
    assert (found.kind, found.state, found.severity, found.step) == ("checkpoint_failed", "raised", "error", 20)
    assert found.facts == CheckpointFacts("out/step-20", FULL, 20, 20, 1, "out/step-10")
    again = fail(30)
    assert (again.state, again.severity, again.step) == ("updated", "error", 30)
    assert again.facts == CheckpointFacts("out/step-30", FULL, 20, 30, 2, "")
    (over,) = judge.complete(Checkpoint(0, 40, 40.0, "out/step-40"))
    assert over.state == "resolved"
    assert judge.complete(Checkpoint(0, 50, 50.0, "out/step-50")) == []
    assert fail(60).state == "raised"


def sample(t: float, *reasons: str, busy: float = 95.0, index: int = 0, **fields: Any) -> DeviceSample:
    return DeviceSample(
        "n", "gpu", index, "H", t, 1, 2, utilization_percent=busy, throttle_reasons=list(reasons), **fields
    )


def kinds(found: list[Finding], state: str = "raised") -> list[str]:
    return [one.kind for one in found if one.state == state]


def test_heat_that_slows_a_gpu_is_told_until_it_ends_and_the_xid_of_a_killed_process_passed_over():
    gpus = Gpus()
    found = [one for t in range(40) for one in gpus.sample(sample(t, "thermal (hardware)", temperature_c=91.0))]
    assert kinds(found) == ["gpu_throttling"]
    facts = found[0].facts
    assert (found[0].severity, found[0].key, facts.host, facts.index) == ("warning", "n:0", "n", 0)
    assert (facts.reasons, facts.temperature_c) == (("thermal (hardware)",), 91.0)
    later = [one for t in range(40, 80) for one in gpus.sample(sample(t))]
    assert kinds(later, "resolved") == ["gpu_throttling"]
    gpus = Gpus()
    assert gpus.xid(Xid("n", 1.0, 45)) == []
    assert kinds(gpus.xid(Xid("n", 1.0, 13, 0))) == ["gpu_xid"]
    (again,) = gpus.xid(Xid("n", 2.0, 13, 0))
    assert (again.state, again.facts.count) == ("updated", 2)
    (other,) = gpus.xid(Xid("n", 3.0, 13, 1))
    assert (other.state, other.facts.count, other.key) == ("raised", 1, "n:1:13"), "another GPU, from NVML"


@pytest.mark.parametrize(
    ("reasons", "busy", "of_20"),
    [
        (("power cap",), 99.0, 20),
        (("application clocks",), 99.0, 20),
        (("thermal (software)",), 3.0, 20),
        (("hardware slowdown",), 99.0, 4),
    ],
)
def test_a_power_cap_set_clocks_an_idle_gpu_and_a_short_slowdown_are_no_findings(reasons, busy, of_20):
    gpus = Gpus()
    slow = [sample(t, *(reasons if t % 20 < of_20 else ()), busy=busy) for t in range(60)]
    assert [found for one in slow for found in gpus.sample(one)] == []


def health(t: float, index: int = 0, **fields: Any) -> DeviceHealth:
    return DeviceHealth("n", index, t, **fields)


def test_uncorrectable_errors_are_told_and_new_ones_are_an_error():
    gpus = Gpus()
    assert gpus.health(health(0, ecc_uncorrected=0)) == []
    (old,) = Gpus().health(health(0, ecc_uncorrected=3))
    assert old.severity == "warning"
    (new,) = gpus.health(health(10, ecc_uncorrected=2))
    assert (new.kind, new.severity, new.facts.new_errors) == ("gpu_memory_errors", "error", 2)
    assert gpus.health(health(20, ecc_uncorrected=2)) == [], "once"
    (pending,) = Gpus().health(health(0, remap_pending=True))
    assert (pending.kind, pending.severity) == ("gpu_memory_errors", "warning")
    assert (pending.facts.remap_pending, pending.facts.remap_failed, pending.facts.uncorrected) == (True, False, None)
    assert Gpus().health(health(0)) == [], "a card that offers nothing"


LINE = "NVRM: Xid (PCI:0000:3b:00): {}, pid=1234, name=python, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("code", "severity", "meaning"),
    [
        (79, "error", "the GPU has fallen off the bus"),
        (48, "error", "an uncorrectable (double bit) memory error"),
        (63, "warning", "a memory row was remapped"),
        (31, "warning", "a memory page fault of a kernel: an illegal address, of the program most often"),
        (999, "warning", "see NVIDIA's list of XID errors"),
    ],
)
def test_an_xid_is_told_with_what_it_means(code, severity, meaning):
    (found,) = Gpus().xid(Xid("n", 1.0, code, -1, "0000:3b:00", LINE.format(code)))
    assert (found.kind, found.state, found.severity) == ("gpu_xid", "raised", severity)
    assert found.facts == XidFacts("n", code, -1, "0000:3b:00", 1, LINE.format(code), meaning)


def test_the_kernels_log_is_read_from_now_on(tmp_path):
    log = tmp_path / "kmsg"
    log.write_text("4,1,1,-;" + LINE.format(13) + "\n")
    xids = Xids("n", str(log))
    assert xids.poll() == [], "what was there before is older than the run"
    with log.open("a") as file:
        file.write("6,2,2,-;something else\n" + "4,3,3,-;" + LINE.format(79) + "\n")
    (found,) = xids.poll()
    assert (found.code, found.bus, found.host) == (79, "0000:3b:00", "n")
    assert xids.poll() == []
    xids.close()
    assert read_xid("4,1,1,-;NVRM: loading", "n", 0.0) is None
    missing = Xids("n", str(tmp_path / "none"))
    assert missing.poll() == []
    missing.close()
