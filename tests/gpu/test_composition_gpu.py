"""What the peaks consist of, on a GPU: against the probe's own counters, and against sizes known by hand."""

import os
import sys

import pytest
from ftmon.protocol.messages.memory import Composition
from ftmon.protocol.messages.telemetry import AllocatorEvents, Hello, Step
from probe_collector import SCRIPTS

pytestmark = pytest.mark.gpu
if not os.path.exists("/dev/nvidia0"):
    pytest.skip("no NVIDIA GPU here", allow_module_level=True)

SINGLE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29513"}
WIDTH = 2048
NUMBERS = 1000 * WIDTH + 12 * (WIDTH * WIDTH + WIDTH)
"""Parameters of the scripts' model."""


def watch(collector, *words, until=None, seconds=180, **extra):
    collector.start(sys.executable, *words, CUDA_VISIBLE_DEVICES="0", DS_ACCELERATOR="cuda", **extra)
    if until is None:
        collector.finish(seconds)
        assert collector.job.returncode == 0, collector.output()
    else:
        collector.collect(until, seconds)
    assert not (collector.run.logs / "probe.log").exists(), collector.output()


def assert_closed(collector):
    steps = {step.step: step for step in collector.of(Step)}
    compositions = [found for found in collector.of(Composition) if found.step in steps]
    assert compositions
    for composition in compositions:
        assert composition.measure == "cuda"
        for phase in composition.phases:
            assert sum(phase.parts.values()) == phase.peak_bytes
            assert phase.peak_bytes == steps[composition.step].phase(phase.name).allocated.peak
            assert phase.parts.get("unattributed", 0) <= phase.peak_bytes // 1000, (composition.note, phase)
    return compositions


def near(found, bytes_):
    """Blocks are rounded up: small ones to 512 bytes each, large ones by less than 1 MiB each."""
    return bytes_ <= found <= bytes_ * 1.02 + 32 * 2**20


def test_a_plain_loop_s_peaks_are_its_parameters_states_gradients_and_foreach_temporaries(collector):
    def settled(c):
        return any(found.step > 6 for found in c.of(Composition)) and c.of(AllocatorEvents)

    watch(collector, SCRIPTS / "gpu_loop.py", "wait", until=settled)
    phases = {phase.name: phase for phase in assert_closed(collector)[-1].phases}
    assert near(phases["optimizer"].parts["parameters"], 4 * NUMBERS)
    assert near(phases["optimizer"].parts["gradients"], 4 * NUMBERS)
    assert near(phases["optimizer"].parts["optimizer_states"], 8 * NUMBERS)
    assert near(phases["optimizer"].parts["temporaries"], 4 * NUMBERS), "foreach takes one parameter-size"
    assert phases["forward"].parts["activations"] > 12 * 4 * 512 * WIDTH * 4
    assert "optimizer_states" in phases["backward"].parts
    events = collector.of(AllocatorEvents)[-1]
    assert events.reserved_bytes >= events.allocated_bytes > 0
    assert events.host_us > 0
    assert events.free_bytes + events.allocated_bytes + events.pending_bytes == events.reserved_bytes


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_s_flat_buffers_and_partitions_are_known(collector, stage):
    watch(collector, SCRIPTS / "composed_engine.py", str(stage), "30", **SINGLE)
    compositions = assert_closed(collector)
    assert len(compositions) >= 2
    phases = {phase.name: phase for phase in compositions[-1].phases}
    parts = phases["optimizer"].parts
    assert near(parts["parameters"], 2 * NUMBERS), parts
    assert near(parts["master_copies"], 4 * NUMBERS), parts
    assert near(parts["optimizer_states"], 8 * NUMBERS), parts
    assert parts["gradients"] >= 2 * NUMBERS, parts
    assert phases["backward"].parts["activations"] > 0
    if stage:
        assert near(phases["backward"].parts["buckets"], 2 * 20_000_000), phases["backward"].parts
    assert collector.of(Hello)[-1].zero_stage == stage
