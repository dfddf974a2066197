"""Failed allocations for tests of the verdict and of its words: one of a full device, and any at all."""

import msgspec
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, Oom, ProcessMemory
from hypothesis import strategies as st

GIB = 2**30
MIB = 2**20
FULL = Oom(
    rank=0,
    step=201,
    phase="backward",
    time=1.0,
    requested_bytes=2 * GIB,
    device_free_bytes=GIB,
    device_total_bytes=80 * GIB,
    allocated_bytes=77 * GIB,
    reserved_bytes=int(77.5 * GIB),
    batch_shape=[4, 2048],
    steps_done=200,
    capacity_bytes=80 * GIB,
    room_bytes=GIB,
    reserved_free_bytes=GIB // 2,
    free_blocks=40,
    largest_free_bytes=64 * MIB,
    usable_free_bytes=GIB // 2,
    largest_shape=[4, 2048],
    largest_shape_step=17,
    peak_bytes=76 * GIB,
    starts=[30 * GIB] * 20,
    stack_of="training",
)
HELLO = Hello(0, 0, 4, "node", 11, 1, DeviceInfo("cuda", 0, "GPU", 80 * GIB), "cuda", 0.0, zero_stage=1)


def of(**fields: object) -> Oom:
    """Make ``FULL`` with other figures."""
    return msgspec.structs.replace(FULL, **fields)


SIZES = st.integers(0, 200 * GIB)
OOMS = st.builds(
    Oom,
    rank=st.just(0),
    step=st.integers(0, 10),
    phase=st.sampled_from(["", "init", "forward", "backward", "optimizer", "eval", "checkpoint"]),
    time=st.just(0.0),
    requested_bytes=SIZES,
    device_free_bytes=SIZES,
    device_total_bytes=SIZES,
    allocated_bytes=SIZES,
    reserved_bytes=SIZES,
    batch_shape=st.lists(st.integers(0, 9000), max_size=3),
    measure=st.sampled_from(["cuda", "glibc"]),
    steps_done=st.integers(0, 1000),
    capacity_bytes=SIZES,
    limit=st.sampled_from(["", "a limit"]),
    room_bytes=SIZES,
    free_blocks=st.integers(0, 9),
    largest_free_bytes=SIZES,
    usable_free_bytes=SIZES,
    largest_shape=st.lists(st.integers(0, 9000), max_size=3),
    peak_bytes=SIZES,
    starts=st.lists(SIZES, max_size=70),
    parts=st.dictionaries(st.sampled_from(["parameters", "activations", "gradients", "other"]), SIZES),
    trainable=st.integers(0, 10**12),
    vocabulary=st.integers(0, 300_000),
    optimizer_class=st.sampled_from(["", "AdamW", "FusedAdam"]),
    optimizer_implementation=st.sampled_from(["", "foreach", "fused"]),
    stack=st.lists(st.sampled_from(["a.py:1 step", "x.py:2 cross_entropy", "b.py:3 _init_group"]), max_size=3),
)
PROCESSES = st.lists(st.builds(ProcessMemory, st.just(1), SIZES, st.sampled_from([0, 1, None])), max_size=3)
