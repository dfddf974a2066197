"""``ftmon predict CONFIG.yaml``: the memory of a step of ftmon's own trainer, beside arithmetic."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rank_jobs
from ftmon.protocol.analysis.estimates.ranking import Largest
from ftmon.protocol.analysis.estimates.time import predicted
from ftmon.protocol.messages.memory import Prediction
from ftmon.protocol.run.rundir import RunDir, RunFile
from ftmon.trainer.predict.answer import render
from ftmon.trainer.predict.result import Prediction as Answer
from ftmon.tui.model.peaks import Answer as WhatIfAnswer

MIB = 1 << 20
RANKS, LENGTH, VOCABULARY, WIDTH = 2, 16384, 32000, 4096
WORKSPACES = 2 * 32 * MIB
BUCKETS = 4 * MIB
H200 = 989.4e12
"""FLOP/s."""
STEPS = 1000
CONFIG = f"""
model:
  config:
    model_type: llama
    vocab_size: {VOCABULARY}
    hidden_size: {WIDTH}
    intermediate_size: 11008
    num_hidden_layers: 2
    num_attention_heads: 32
    num_key_value_heads: 8
data: {{path: DATA, packing: true}}
training: {{sequence_length: {LENGTH}, max_steps: {STEPS}, grad_accumulation: 1}}
zero: {{stage: 2, bucket_bytes: {MIB}}}
run: {{ranks: {RANKS}}}
"""
SMALL = """
model:
  config: {model_type: llama, vocab_size: 8192, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2,
           num_attention_heads: 4, num_key_value_heads: 4}
  fused_loss: "off"
  compile: "off"
data: {path: DATA, packing: false}
training: {sequence_length: 2048, epochs: 1, grad_accumulation: 1}
zero: {stage: 2, bucket_bytes: 1048576}
run: {ranks: 1}
"""
ROWS = [300, 40, 1500, 60, 900, 80, 700, 20, 1800, 100, 200, 400]
"""Words of each row of its data."""
DOCUMENT = 512
"""Tokens of each document of packed rows, its end counted."""
CAPACITY = 320 * MIB
"""Holds some of these lengths and not all."""
PARAMETERS = 2 * VOCABULARY * WIDTH + 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * 1024 + 3 * WIDTH * 11008 + 2 * WIDTH) + WIDTH
SMALLEST = ["optimizer.kind=adamw_bf16", "optimizer.master_weights=none", "model.compile=off"]
CASES = {
    "small": SMALLEST,
    "logits": [*SMALLEST, "model.fused_loss=off"],
    "shared": [*SMALLEST, "training.sequence_parallel_size=2"],
    "zero 3": ["zero.stage=3"],
    "lora": ["zero.stage=3", "lora.rank=8", "model.gradient_checkpointing=layers", "model.compile=off"],
    "uncompiled": ["zero.stage=3", "model.compile=off"],
}
QUANTIZED = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": WIDTH,
    "intermediate_size": 11008, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
LENGTHS = ["125,1024", "125"]
"""Of packed rows."""
MICRO_STEPS = (2, 3, 8)
GRID = range(512, 2049, 512)
ON_THE_HUB = [
    "model.config={model_type: llama, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1}",
    "data.name=me/words",
    "training.sequence_length=64",
    "model.compile=off",
]
REFUSED = {
    "no such folder": (["--model", "/no/such/folder"], "/no/such/folder: no such folder or file"),
    "no configuration": (["--model", "FOLDER"], "FOLDER: has no config.json"),
    "no network": (
        ["--model", "someone/some-model"],
        "someone/some-model: cannot reach 127.0.0.1 (Connection refused), and the cache has no copy",
    ),
    "no data set without a network": (
        ["--data", "--json", "--", *ON_THE_HUB],
        "command line: data.name me/words: cannot reach 127.0.0.1",
    ),
    "not an object": (["--model", "MODEL", "--deepspeed", "DS"], "DS: zero_optimization: must be an object, not int"),
    "DeepSpeed's own words": (
        ["--model", "MODEL", "--deepspeed", "OTHER"],
        "FOLDER/other.json:3: offload_optimizer.device: Input should be",
    ),
    "unknown model": (["--model", "UNKNOWN"], "FOLDER/unknown.json: transformers knows no model type: nosuch"),
}
"""Arguments of what is refused, and the line that says so."""


SEGMENT = 20 << 20
"""Bytes that PyTorch reserves at a time for a block of 1 to 10 MiB."""


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("predict")
    (folder / "data.jsonl").write_text('{"text": "some text"}\n')
    (folder / "c.yaml").write_text(CONFIG.replace("DATA", str(folder / "data.jsonl")))
    words = [["--json", "--price=2", "--", str(folder / "c.yaml"), *overrides] for overrides in CASES.values()]
    (folder / "m.json").write_text('{"model_type": "llama"}')
    (folder / "unknown.json").write_text('{"model_type": "nosuch"}')
    (folder / "other.json").write_text('{"zero_optimization": {\n"stage": 2,\n"offload_optimizer": {"device": "gpu"}}}')
    (folder / "ds.json").write_text('{"zero_optimization": 3}')
    (folder / "rows.jsonl").write_text("".join(f'{{"text": "{"word " * count}"}}\n' for count in ROWS))
    config = SMALL.replace("DATA", str(folder / "rows.jsonl"))
    (folder / "small.yaml").write_text(config)
    words.append([f"--capacity={CAPACITY}", "--data", "--price=3.6", "--json", "--", str(folder / "small.yaml")])
    count = RANKS * LENGTH // DOCUMENT
    (folder / "documents.jsonl").write_text(f'{{"text": "{"word " * (DOCUMENT - 1)}"}}\n' * count)
    documents = f"data.path={folder / 'documents.jsonl'}"
    words.append(["--data", "--json", "--", str(folder / "c.yaml"), *SMALLEST, documents])
    half = "word " * (DOCUMENT // 2)
    (folder / "answers.jsonl").write_text((json.dumps({"prompt": half, "response": half}) + "\n") * count)
    words.append([*words[-1][:-1], f"data.path={folder / 'answers.jsonl'}"])
    small = [str(folder / "small.yaml")]
    for lengths in LENGTHS:
        words.append([f"--sequence-length={lengths}", "--json", "--", *small, "data.packing=true"])
    for count in MICRO_STEPS:
        words.append(["--json", "--", *small, f"training.grad_accumulation={count}"])
    grid = f"--sequence-length={','.join(map(str, GRID))}"
    words.append([f"--capacity={CAPACITY}", "--largest", grid, "--json", "--", str(folder / "small.yaml")])
    words[-1].append("training.total_batch=1")
    many = [*small, "run.ranks=2", "model.config.num_hidden_layers=8", "training.sequence_length=512"]
    for options, change in ((["--what-if"], []), ([], ["lora.rank=16"])):
        words.append([*options, "--json", "--", *many, "zero.stage=3", "training.precision=bf16", *change])
    recomputed = [*many, "zero.stage=1", "training.precision=bf16", "model.gradient_checkpointing=layers"]
    for options, change in ((["--what-if"], []), ([], ["lora.rank=16"]), ([], ["optimizer.kind=adamw_8bit"])):
        words.append([*options, "--json", "--", *recomputed, *change])
    (folder / "quantized").mkdir()
    (folder / "quantized" / "config.json").write_text(json.dumps(QUANTIZED))
    (folder / "quantized.yaml").write_text(
        f"model: {{name: {folder / 'quantized'}, quantization: nf4}}\ndata: {{path: {folder / 'data.jsonl'}}}\n"
        "lora: {rank: 8, merge: false}\ntraining: {sequence_length: 2048}\n"
    )
    words.append(["--json", "--", str(folder / "quantized.yaml")])
    run = RunDir(folder / "run")
    run.path.mkdir()
    run.config.write_text(config)
    run.write_run(RunFile("run", "run", 1.0, ["ftmon"], str(folder), "here", "train"))
    words.append(["live", str(run.path), "NVIDIA H200"])
    words.append(["--json", "--", *ON_THE_HUB])
    words += [[_in(folder, word) for word in given] for given, _ in REFUSED.values()]
    answers = rank_jobs.predictions(words, folder)
    for answer in answers:
        answer["output"] = answer["output"].replace(str(folder / "ds.json"), "DS").replace(str(folder), "FOLDER")
    names: list[Any] = [*CASES, "data", "documents", "answers", *LENGTHS, *MICRO_STEPS, "largest"]
    names += ["many", "adapted", "recomputed", "recomputed, adapted", "recomputed, in 8 bit"]
    return dict(zip([*names, "quantized", "live", "hub", *REFUSED], answers, strict=True))


def _in(folder: Path, word: str) -> str:
    files = {"MODEL": "m.json", "DS": "ds.json", "OTHER": "other.json", "UNKNOWN": "unknown.json", "FOLDER": ""}
    return str(folder / files[word]) if word in files else word


def point(answer: dict[str, Any]) -> dict[str, int]:
    assert answer["status"] == 0, answer["output"]
    prediction = json.loads(answer["output"])
    assert prediction["ranks"] == RANKS
    found = prediction["points"][0]
    assert found["sequence_length"] == LENGTH
    return {name: phase["allocated_peak_bytes"] for name, phase in found["ranks"][0]["phases"].items()}


def test_the_optimizer_phase_holds_weights_gradients_and_states(predictions):
    rest = WORKSPACES + BUCKETS
    share = PARAMETERS / RANKS
    # Weights in bf16, whole and as a share; two running averages in bf16; gradients as they were reduced, and flat.
    held = 2 * PARAMETERS + (2 + 4 + 2 + 2) * share
    assert point(predictions["small"])["optimizer"] == pytest.approx(held + rest, rel=0.02)
    # All in shares: weights in bf16, and in fp32 with two running averages and gradients. Gradients are copied once.
    held = (2 + 4 + 8 + 4) * share
    assert held <= point(predictions["zero 3"])["optimizer"] <= held + (2 + 4) * share + rest
    # Next to nothing but the frozen base's share.
    held = 2 * share
    assert held <= point(predictions["lora"])["optimizer"] <= 1.1 * held + rest


def test_what_a_layer_and_two_show_of_a_change_and_of_recomputed_layers_is_what_dry_runs_find(predictions):
    changes = {one["name"]: one for one in json.loads(predictions["many"]["output"])["what_if"]}
    assert all(changes[name]["fitted"] for name in ("selective checkpointing", "fused loss", "parameter offload"))
    assert not changes["nothing kept gathered"]["fitted"]  # a small model's parameters are gathered once
    adapted = changes["LoRA of rank 16"]
    (own,) = json.loads(predictions["adapted"]["output"])["points"]
    assert adapted["fitted"]
    assert adapted["step_seconds"] == pytest.approx(own["step_seconds"], rel=0.05)
    assert adapted["needed_bytes"] == pytest.approx(own["needed_bytes"], rel=0.1)
    changes = {one["name"]: one for one in json.loads(predictions["recomputed"]["output"])["what_if"]}
    own = [json.loads(predictions[f"recomputed, {name}"]["output"])["points"][0] for name in ("adapted", "in 8 bit")]
    adapted, in_8_bit = changes["LoRA of rank 16"], changes["optimizer in 8 bit"]
    assert not adapted["fitted"]
    assert all(adapted[figure] == own[0][figure] for figure in ("needed_bytes", "step_seconds"))
    assert in_8_bit["fitted"]
    assert in_8_bit["step_seconds"] == pytest.approx(own[1]["step_seconds"], rel=0.03)
    assert in_8_bit["needed_bytes"] == pytest.approx(own[1]["needed_bytes"], abs=2 * SEGMENT)


def test_more_micro_steps_take_more_time_and_no_more_memory(predictions):
    two, three, eight = (json.loads(predictions[count]["output"])["points"][0] for count in MICRO_STEPS)
    for phase in ("forward", "backward", "optimizer"):
        assert eight["ranks"][0]["phases"][phase] == three["ranks"][0]["phases"][phase]
    for part in ("compute_seconds", "host_seconds"):
        middle = three["time"][part] - two["time"][part]
        assert eight["time"][part] == pytest.approx(two["time"][part] + 6 * middle)


def test_a_peak_consists_of_what_the_memory_screen_calls_it(predictions):
    for case in ("small", "logits", "zero 3", "lora"):
        for phase in ("forward", "backward", "optimizer"):
            found = _phases(predictions[case])[phase]
            assert sum(found["parts"].values()) == found["allocated_peak_bytes"], (case, phase)
    share = PARAMETERS / RANKS
    small = _phases(predictions["small"])["optimizer"]["parts"]
    # All in bf16: weights whole and, as the optimizer's, in shares; cuBLAS' workspaces are of no known use.
    assert small["parameters"] == pytest.approx(2 * PARAMETERS, rel=0.02)
    assert small["master_copies"] == pytest.approx(2 * share, rel=0.02)
    assert small["optimizer_states"] == pytest.approx(4 * share, rel=0.02)
    assert small["gradients"] == pytest.approx((2 + 2) * share, rel=0.02)
    assert small["other"] == pytest.approx(WORKSPACES, rel=0.01)
    zero_3 = _phases(predictions["zero 3"])
    assert zero_3["optimizer"]["parts"]["master_copies"] == pytest.approx(4 * share, rel=0.02)
    assert zero_3["optimizer"]["parts"]["optimizer_states"] == pytest.approx(8 * share, rel=0.02)
    activations = {
        name: _phases(predictions[name])["forward"]["parts"]["activations"] for name in CASES if name != "uncompiled"
    }
    assert activations["logits"] > activations["small"] > 3 * activations["lora"] > 0, activations
    # What checkpointed layers compute again in the backward pass is kept for gradients: activations, not temporaries.
    again = _phases(predictions["lora"])["backward"]["parts"]
    assert again["activations"] > 1.5 * LENGTH * WIDTH * 2, again


def _phases(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    assert answer["status"] == 0, answer["output"]
    return json.loads(answer["output"])["points"][0]["ranks"][0]["phases"]


def test_a_step_takes_its_matrix_products_and_costs_its_gpus(predictions):
    prediction = json.loads(predictions["small"]["output"])
    point = prediction["points"][0]
    seconds, time = point["step_seconds"], point["time"]
    # Six FLOPs a parameter and token but for the embedding, and causal attention, at 70 % of an H200's 989.4 TFLOP/s at
    # most, and not at less than a third.
    flops = 6 * (PARAMETERS - VOCABULARY * WIDTH) * LENGTH + 12 * 2 * WIDTH * LENGTH * LENGTH / 2
    assert flops / 989.4e12 / 0.7 < seconds < 3 * flops / 989.4e12
    assert point["mfu"] == pytest.approx(flops / 989.4e12 / seconds, rel=0.01)
    assert time["total"]["value"] == seconds
    assert 0 < time["total"]["error"] <= 0.5
    assert "of the arithmetic rate" in time["total"]["basis"]
    assert point["tokens_per_second"] == pytest.approx(RANKS * LENGTH / seconds)
    assert point["price_per_million_tokens"] == pytest.approx(RANKS * 2 / 3600 * 1e6 * seconds / (RANKS * LENGTH))
    assert point["run_seconds"] == pytest.approx(STEPS * seconds)
    assert point["run_price"] == pytest.approx(STEPS * seconds / 3600 * RANKS * 2)
    assert prediction["expected_errors"]["allocated_peak_bytes"]["error"] <= 0.05
    assert prediction["gpu"] == "H200 141 GB"


def test_it_says_which_gpus_hold_the_run_and_what_it_assumed(predictions):
    small, logits = (json.loads(predictions[name]["output"])["points"][0] for name in ("small", "logits"))
    for point in (small, logits):
        peaks = [phase for rank in point["ranks"] for phase in rank["phases"].values()]
        assert max(one["allocated_peak_bytes"] for one in peaks) <= point["needed_bytes"]
        assert point["needed_bytes"] <= max(one["reserved_peak_bytes"] for one in peaks)
    assert set(logits["fits_on"]) < set(small["fits_on"])
    assert "H200 141 GB" in logits["fits_on"]
    assert "RTX 4060 8 GB" not in small["fits_on"]
    prediction = json.loads(predictions["small"]["output"])
    assert prediction["parameters"] == PARAMETERS
    assert any("packed row" in note for note in prediction["notes"])


def test_the_fused_loss_saves_the_logits_and_takes_time_for_the_tokens_that_carry_it(predictions):
    logits = LENGTH * VOCABULARY
    saved = point(predictions["logits"])["backward"] - point(predictions["small"])["backward"]
    # fp32 log-probabilities, their gradients, and logits in bf16; less a chunk of 256 MiB and its copies.
    assert 4 * logits < saved < 12 * logits
    whole, answers = (json.loads(predictions[case]["output"]) for case in ("documents", "answers"))
    assert any("50% of the tokens carry loss" in note for note in answers["notes"])
    # Half of the tokens: three products with the last layer's weight, and the kernel that replaces logits by gradients.
    products = 3 * 2 * VOCABULARY * WIDTH / (0.76 * H200)
    less = LENGTH / 2 * (products + 3 * 2 * VOCABULARY / (0.7 * 4.8e12)) / 0.98
    times = [found["points"][0]["time"]["compute_seconds"] for found in (whole, answers)]
    assert times[0] - times[1] == pytest.approx(less, rel=0.05)
    assert point(predictions["answers"]) == point(predictions["documents"]), "some micro-batch may consist of answers"


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes, for the weights in 4 bits")
def test_weights_in_4_bits_take_half_a_byte_and_their_scales(predictions):
    assert predictions["quantized"]["status"] == 0, predictions["quantized"]["output"]
    found = json.loads(predictions["quantized"]["output"])
    linear = 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * 1024 + 3 * WIDTH * 11008)
    adapters = 8 * 2 * (2 * (WIDTH + WIDTH) + 2 * (WIDTH + 1024) + 3 * (WIDTH + 11008))
    assert (found["trainable"], found["parameters"]) == (adapters, PARAMETERS + adapters)
    # NF4 of blocks of 64 whose scales have 8 bits, in blocks of 256 with an fp32 scale each (arXiv 2305.14314).
    packed = linear / 2 + linear / 64 + 4 * linear / 64 / 256
    whole = 2 * (PARAMETERS - linear + adapters)
    (rank,) = found["points"][0]["ranks"]
    assert rank["phases"]["forward"]["parts"]["parameters"] == pytest.approx(packed + whole, rel=0.01)
    assert rank["host_bytes"] < 64 * MIB, "no weight lies on the host as a whole"
    assert found["checkpoint_bytes"] == pytest.approx(14 * adapters, rel=0.01), "the adapters' alone"


def test_the_largest_length_and_micro_batch_that_fit_a_capacity_are_found(predictions):
    assert predictions["largest"]["status"] == 0, predictions["largest"]["output"]
    found = msgspec.json.decode(predictions["largest"]["output"], type=Answer)
    (holds,) = found.largest
    assert (holds.gpu, holds.capacity_bytes) == ("", CAPACITY)
    first = min(point.sequence_length for point in found.points if not point.fits)
    assert first > GRID[0]
    assert holds.sequence_length.value is not None
    assert holds.sequence_length.above is not None
    assert first - 512 <= holds.sequence_length.value < holds.sequence_length.above <= first
    assert holds.sequence_length.above <= holds.sequence_length.value * 1.008
    assert found.points[-1].fits is False, "2,048 tokens do not fit, so no micro-batch of them does"
    assert holds.micro_batch == Largest(None, 1)
    assert "the capacity" in render(found)
    assert len(found.pieces) > 1
    assert [piece.phase for piece in found.batch_pieces] == ["backward"]


def test_ranks_that_share_sequences_hold_a_slice_of_the_activations(predictions):
    whole, shared = (_phases(predictions[name])["forward"]["parts"] for name in ("small", "shared"))
    # Each of the two layers holds its attention's output twice, before and after it is exchanged.
    again = 2 * LENGTH // 2 * WIDTH * 2
    assert shared["activations"] == pytest.approx(whole["activations"] / 2 + again, rel=0.001)
    assert shared["parameters"] == whole["parameters"]
    prediction = json.loads(predictions["shared"]["output"])
    found, before = prediction["points"][0], json.loads(predictions["small"]["output"])["points"][0]
    # Half of the rows, in about half of the time.
    tokens = RANKS / 2 * LENGTH
    assert found["tokens_per_second"] == pytest.approx(tokens / found["step_seconds"])
    assert found["mfu"] * found["step_seconds"] == pytest.approx(before["mfu"] * before["step_seconds"] / 2)
    assert 0.5 * before["step_seconds"] < found["step_seconds"] < 0.9 * before["step_seconds"]
    assert any(note.startswith("2 ranks share each sequence") for note in prediction["notes"])


def test_compiled_layers_keep_less_and_take_less_time(predictions):
    compiled, plain = (_phases(predictions[case]) for case in ("zero 3", "uncompiled"))
    same = "optimizer_states", "master_copies", "gradients"
    seen = [compiled["optimizer"]["parts"][part] for part in same]
    assert seen == [plain["optimizer"]["parts"][part] for part in same]
    # Of each layer and token: two norms' inputs in fp32, and the output of the gate's function in bf16.
    less = plain["forward"]["parts"]["activations"] - compiled["forward"]["parts"]["activations"]
    assert less == 2 * LENGTH * (2 * WIDTH * 4 + 11008 * 2)
    found = [json.loads(predictions[case]["output"]) for case in ("zero 3", "uncompiled")]
    first, second = (one["points"][0]["time"] for one in found)
    assert first["compute_seconds"] < second["compute_seconds"]
    assert first["host_seconds"] < second["host_seconds"]
    assert not any("uncompiled" in note for note in found[0]["notes"])


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_model_or_file_is_refused_in_one_line(predictions, case):
    answer = predictions[case]
    assert answer["status"] == 2
    assert len(answer["output"].splitlines()) == 1, answer["output"]
    assert answer["output"].startswith(f"ftmon: {REFUSED[case][1]}")


def test_steps_of_a_data_set_that_do_not_fit_are_named_and_one_of_the_hub_is_needed_only_with_data(predictions):
    assert predictions["data"]["status"] == 0, predictions["data"]["output"]
    prediction = json.loads(predictions["data"]["output"])
    risk, words = prediction["data"], render(msgspec.convert(prediction, Answer))
    assert risk["steps"] == len(ROWS)
    assert 0 < risk["failing_steps"] < risk["steps"]
    assert risk["longest"] == max(risk["failing"], key=lambda step: step["length"])
    assert all(step["length"] > risk["largest_length"] for step in risk["failing"])
    lengths = [ROWS[row] for step in risk["failing"] for row in step["rows"]]
    assert max(ROWS) in lengths
    assert min(lengths) > min(ROWS)
    assert msgspec.convert(prediction, WhatIfAnswer).capacity_bytes == CAPACITY, "the app reads such an answer, too"
    assert prediction["points"][0]["fits"] is False, "2,048 tokens are longer than any row"
    assert prediction["points"][0]["run_seconds"] > 0, "the steps are known"
    assert risk["epoch_seconds"] == pytest.approx(risk["steps"] * prediction["points"][0]["step_seconds"])
    assert risk["epoch_price"] == pytest.approx(risk["epoch_seconds"] / 1000), "3.6 an hour are a thousandth a second"
    assert f"an epoch: {risk['steps']} steps, " in words
    line = next(line for line in words.splitlines() if line.startswith("data: "))
    assert line == (
        f"data: {risk['failing_steps']} of {risk['steps']} steps of an epoch do not fit; of the lengths that occur, "
        f"{risk['largest_length']:,} tokens is the largest that fits"
    )
    assert predictions["hub"]["status"] == 0, predictions["hub"]["output"]
    assert json.loads(predictions["hub"]["output"])["points"][0]["sequence_length"] == 64


def test_packed_rows_consist_of_the_documents_of_the_data_set_and_each_length_is_a_run_of_its_own(predictions):
    assert predictions["documents"]["status"] == 0, predictions["documents"]["output"]
    one, many = (json.loads(predictions[case]["output"]) for case in ("small", "documents"))
    before, after = one["points"][0]["time"]["total"], many["points"][0]["time"]["total"]
    # Without them the stated error reaches down to attention that takes no time; with them it is that of kernels.
    assert before["value"] * (1 - before["error"]) <= after["value"] < 0.9 * before["value"]
    assert before["error"] > after["error"] == 0.1
    # FLOPs of attention are in proportion to pairs of query and key: 12 for each, layer and unit of width.
    flops = [found["points"][0]["mfu"] * total["value"] for found, total in ((one, before), (many, after))]
    pairs = [LENGTH // tokens * (tokens * (tokens + 1) // 2) for tokens in (LENGTH, DOCUMENT)]
    less = 12 * 2 * WIDTH * (pairs[0] - pairs[1])
    assert flops[0] - flops[1] == pytest.approx(less / H200, rel=0.01)
    several, alone = (json.loads(predictions[lengths]["output"])["points"] for lengths in LENGTHS)
    assert [point["sequence_length"] for point in several] == [125, 1024]
    assert several[0] == alone[0]
    first, last = (point["ranks"][0]["phases"]["forward"]["allocated_peak_bytes"] for point in several)
    assert last - first > (1024 - 125) * 8192 * 2, "at least the logits of the other tokens"


def test_the_prediction_beside_a_run_has_the_figures_of_the_command(predictions):
    assert predictions["live"]["status"] == 0, predictions["live"]["output"]
    found = msgspec.json.decode(predictions["live"]["output"], type=Prediction)
    assert not found.refused
    assert (found.gpu, found.micro_batch) == ("H200 141 GB", 1)
    assert sorted({point.sequence_length for point in found.points}) == [128, 256, 512, 1024, 2048]
    point = json.loads(predictions["data"]["output"])["points"][0]
    for name in ("forward", "backward", "optimizer"):
        phase, expected = predicted(found, 0, name, 2048), point["ranks"][0]["phases"][name]
        assert phase.allocated_peak_bytes == pytest.approx(expected["allocated_peak_bytes"], rel=0.001)
        assert sum(phase.parts.values()) == phase.allocated_peak_bytes
    assert found.nvml_bytes == pytest.approx(point["nvml_bytes"], rel=0.01)
