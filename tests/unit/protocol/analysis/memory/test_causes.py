"""Which blocks made up a phase's peak, by the allocator's trace."""

import gzip
import pickle
from typing import Any

import pytest
from ftmon.protocol.analysis.memory import causes
from ftmon.protocol.analysis.remedies import remedy_of
from ftmon.protocol.messages.memory import Cause
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, StackGroup
from places import DATA

MIB = 2**20


def entry(time_us: int, action: str, address: int, mib: int) -> causes.Entry:
    return {"action": action, "addr": address, "size": mib * MIB, "time_us": time_us, "frames": []}


GATHERED = [
    entry(1, "alloc", 1, 2000),
    entry(2, "free_requested", 1, 2000),
    # The phase begins. Another stream used the gathered parameters: their memory comes back only now.
    entry(11, "free_completed", 1, 2000),
    entry(12, "alloc", 2, 1500),
    entry(13, "free_requested", 2, 1500),
    entry(14, "free_completed", 2, 1500),
]


WITHOUT_REQUESTS = [each for each in GATHERED[3:] if each["action"] != "free_requested"]


@pytest.mark.parametrize(("trace", "found"), [(GATHERED, [3]), (WITHOUT_REQUESTS, [0])])
def test_a_block_whose_free_was_requested_before_the_phase_does_not_lower_the_peak(trace, found):
    # As the allocator's counter, which follows the request; without requests the completed frees count.
    assert causes.blocks_at_peak(trace, [causes.Span(10, 20, 500 * MIB)]) == (2000 * MIB, found, frozenset())


# Patterns on real stacks (a ZeRO-3 step of a 0.5B model on an H200) and on hand-made ones.


GIB = 2**30
VOCABULARY, TOKENS = 151_936, 1024
SITE = "/opt/venv/lib/python3.12/site-packages"


@pytest.fixture(scope="module")
def trace() -> list[causes.Entry]:
    with gzip.open(DATA / "step_zero3.pickle.gz") as file:
        return pickle.load(file)["device_traces"][0]


def cause_of(trace: list[causes.Entry], call: str) -> Cause:
    """What arming the phase of one of the engine's calls would have found in this real step."""

    def is_call(frame: dict[str, Any]) -> bool:
        return frame["name"] == call and frame["filename"].endswith("runtime/engine.py")

    times = [entry["time_us"] for entry in trace if any(map(is_call, entry["frames"]))]
    # A phase lasts until the next one begins: to what is freed at its end.
    blocks = causes.blocks_at_peak(trace, [causes.Span(times[0], times[-1], 0)])
    groups, told = causes.grouped(trace, blocks)
    sizes: dict[str, Any] = {"parameter_bytes": 885 * MIB, "trainable": 464_000_000, "vocabulary": VOCABULARY}
    return Cause(0, 3, call, 0.0, "spike", blocks.total_bytes, groups, attributed_bytes=told, **sizes)


def test_logits_are_told_in_the_forward_by_their_stack_and_in_the_backward_by_their_size(trace):
    forward = causes.name_cause(cause_of(trace, "forward"), TOKENS)
    assert forward.pattern == "fp32_logits"
    # Logits in bf16, once more in fp32, and their logarithms in fp32: 2 + 4 + 4 bytes for each.
    assert forward.parts[0].bytes == pytest.approx(VOCABULARY * TOKENS * 10, rel=0.01)
    backward = causes.name_cause(cause_of(trace, "backward"), TOKENS)
    assert backward.pattern == "fp32_logits"
    assert backward.parts[0].bytes == pytest.approx(VOCABULARY * TOKENS * 8, rel=0.01)
    assert backward.parts[0].where == ""
    assert causes.name_cause(cause_of(trace, "backward"), TOKENS * 3).pattern == ""


def test_every_known_pattern_of_the_real_step_is_found_as_the_copied_gradients_of_zero_3_s_update(trace):
    found = {
        causes.pattern_of([f"{f['filename']}:{f['line']} {f['name']}" for f in reversed(entry["frames"])])[0]
        for entry in trace
        if entry["action"] == "alloc"
    }
    assert found >= {"gradient_upcast", "reduce_bucket", "fp32_logits"}
    named = causes.name_cause(cause_of(trace, "step"), TOKENS)
    assert named.pattern == "gradient_upcast"
    assert named.parts[0].bytes == pytest.approx(named.total, rel=0.01)
    assert named.parts[0].where == "stage3.py:2686 _prepare_fp32_grad_for_sub_group"


@pytest.mark.parametrize(
    ("innermost", "pattern"),
    [
        (f"{SITE}/torch/optim/adam.py:640 _multi_tensor_adam", "foreach_temporaries"),
        (f"{SITE}/torch/optim/adamw.py:420 _single_tensor_adamw", "optimizer_temporaries"),
        (f"{SITE}/torch/optim/adam.py:180 _init_group", "first_step_states"),
        (f"{SITE}/deepspeed/ops/adam/fused_adam.py:135 step", "first_step_states"),
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:2200 step", "gradient_upcast"),
        (f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:1700 average_tensor", "reduce_bucket"),
        (f"{SITE}/deepspeed/runtime/zero/stage3.py:1931 __avg_scatter_grads", "reduce_bucket"),
        (f"{SITE}/deepspeed/runtime/zero/partition_parameters.py:1329 _all_gather_dtype", "allgather_bucket"),
        (f"{SITE}/transformers/loss/loss_utils.py:59 ForCausalLMLoss", "fp32_logits"),
        (f"{SITE}/torch/serialization.py:900 _save", "checkpoint_saving"),
        (f"{SITE}/torch/utils/checkpoint.py:1100 recompute_fn", "recomputation"),
        ("/home/user/train.py:7 step", ""),
        ("no frame at all", ""),
    ],
)
def test_a_frame_is_known_by_its_file_and_function(innermost, pattern):
    outer = ["/home/user/train.py:80 main", f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:2200 step"]
    assert causes.pattern_of([outer[0], innermost])[0] == pattern
    assert causes.pattern_of([*outer, innermost])[0] == (pattern or "gradient_upcast"), (
        "the innermost known frame decides"
    )


def test_a_place_is_the_persons_own_code_where_there_is_some():
    library = [f"{SITE}/peft/model.py:5 forward", f"{SITE}/torch/nn/modules/linear.py:1 forward"]
    frames = ["/home/user/train.py:80 main", *library]
    places = ["train.py:80 main", "model.py:5 forward", "linear.py:1 forward", ""]
    assert [causes.place_of(frames[first:]) for first in range(4)] == places
    assert causes.parse_frame("C:\\run\\train.py:80 main").short == "train.py:80 main"


def test_two_patterns_are_named_a_small_share_is_not_and_what_stayed_counts_where_nothing_else_peaked():
    groups = [
        StackGroup(900 * MIB, 1, [f"{SITE}/torch/optim/adam.py:640 _multi_tensor_adam"]),
        StackGroup(880 * MIB, 1, [f"{SITE}/deepspeed/runtime/zero/stage_1_and_2.py:2200 step"]),
        StackGroup(20 * MIB, 1, [f"{SITE}/deepspeed/runtime/utils.py:1008 all_gather_into_tensor_dp_groups"]),
    ]
    named = causes.name_cause(Cause(0, 3, "optimizer", 0.0, "spike", 1800 * MIB, groups), 0)
    assert [part.pattern for part in named.parts] == ["foreach_temporaries", "gradient_upcast"]
    assert named.elsewhere.bytes == 20 * MIB
    logits = StackGroup(600 * MIB, 1, [f"{SITE}/torch/nn/functional.py:3504 cross_entropy"], kept_bytes=600 * MIB)
    gather = StackGroup(500 * MIB, 1, [f"{SITE}/deepspeed/runtime/zero/partition_parameters.py:1329 _all_gather_dtype"])
    for size, groups, pattern in ((500, [gather, logits], "allgather_bucket"), (600, [logits], "fp32_logits")):
        assert causes.name_cause(Cause(0, 3, "forward", 0.0, "spike", size * MIB, groups), 0).pattern == pattern


SMALL_BUCKET = {"zero_optimization": {"allgather_bucket_size": 1e8}}


def hello(**fields: Any) -> Hello:
    device = DeviceInfo("cuda", 0, "H200", 140 * GIB)
    return Hello(0, 0, fields.pop("world", 4), "host", 1, 1, device, "cuda", 0.0, **fields)


@pytest.mark.parametrize(
    ("pattern", "fields", "words", "saves"),
    [
        ("foreach_temporaries", {"framework": "transformers"}, "adamw_torch_fused", GIB),
        ("foreach_temporaries", {"framework": "deepspeed"}, "FusedAdam", GIB),
        ("foreach_temporaries", {}, "fused=True", GIB),
        ("reduce_bucket", {"zero_stage": 2}, "reduce_bucket_size: 2e+08 in place of 5e+08", GIB - GIB * 2 // 5),
        (
            "allgather_bucket",
            {"zero_stage": 2, "deepspeed_config": SMALL_BUCKET},
            "allgather_bucket_size (now 1e+08",
            0,
        ),
        ("allgather_bucket", {"zero_stage": 3}, "stage3_prefetch_bucket_size", 0),
        ("gradient_upcast", {"zero_stage": 3}, "sub_group_size", GIB - GIB // 5),
        ("gradient_upcast", {"zero_stage": 2}, "offload_optimizer", GIB),
        ("gradient_upcast", {}, "divides it among the 4 ranks", GIB - GIB // 4),
        ("gradient_upcast", {"world": 1}, "offload_optimizer", GIB),
        ("allgather_bucket", {"framework": "fsdp"}, "wrap each layer", 0),
        ("reduce_bucket", {"framework": "fsdp"}, "wrap each layer", 0),
        ("first_step_states", {"framework": "fsdp"}, "CPUOffloadPolicy", 0),
        ("checkpoint_saving", {"framework": "fsdp"}, "sharded state dict", 0),
        ("fp32_logits", {}, "use_liger_kernel", GIB),
        ("checkpoint_saving", {}, "save less often", 0),
    ],
)
def test_a_remedy_names_the_option_and_what_it_saves_where_the_numbers_say(pattern, fields, words, saves):
    remedy = remedy_of(pattern, GIB, hello(**fields))
    assert words in remedy.text
    assert remedy.frees_bytes == saves
