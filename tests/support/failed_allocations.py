"""Failed allocations for tests of the verdict and of its words: one of a full device, and any at all."""

import msgspec
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, Oom, ProcessMemory
from hypothesis import strategies as st
from places import DATA

GIB = 2**30
MIB = 2**20
CASES = msgspec.json.decode((DATA / "ooms.json").read_bytes(), type=dict[str, Oom])
FULL = CASES["full"]  # the backward pass of a batch like the others on a full device
HELD = CASES["held"]  # a rank of a 1B model under ZeRO-2: the logits of a batch longer than any before
HELLO = Hello(0, 0, 4, "node", 11, 1, DeviceInfo("cuda", 0, "GPU", 80 * GIB), "cuda", 0.0, zero_stage=1)


def of(**fields: object) -> Oom:
    return msgspec.structs.replace(FULL, **fields)


SIZES = st.integers(0, 200 * GIB)
SHAPES = st.lists(st.integers(0, 9000), max_size=3)
_SIZES = (
    *("requested_bytes", "device_free_bytes", "device_total_bytes", "allocated_bytes", "reserved_bytes", "room_bytes"),
    *("capacity_bytes", "largest_free_bytes", "usable_free_bytes", "peak_bytes"),
)
OOMS = st.builds(
    Oom,
    rank=st.just(0),
    step=st.integers(0, 10),
    phase=st.sampled_from(["", "init", "forward", "backward", "optimizer", "eval", "checkpoint"]),
    time=st.just(0.0),
    batch_shape=SHAPES,
    measure=st.sampled_from(["cuda", "glibc"]),
    steps_done=st.integers(0, 1000),
    limit=st.sampled_from(["", "a limit"]),
    free_blocks=st.integers(0, 9),
    largest_shape=SHAPES,
    starts=st.lists(SIZES, max_size=70),
    parts=st.dictionaries(st.sampled_from(["parameters", "activations", "gradients", "other"]), SIZES),
    trainable=st.integers(0, 10**12),
    vocabulary=st.integers(0, 300_000),
    optimizer_class=st.sampled_from(["", "AdamW", "FusedAdam"]),
    optimizer_implementation=st.sampled_from(["", "foreach", "fused"]),
    stack=st.lists(st.sampled_from(["a.py:1 step", "x.py:2 cross_entropy", "b.py:3 _init_group"]), max_size=3),
    **dict.fromkeys(_SIZES, SIZES),
)
PROCESSES = st.lists(st.builds(ProcessMemory, st.just(1), SIZES, st.sampled_from([0, 1, None])), max_size=3)
