"""Which changes of a run are predicted, and how they are asked for."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ftmon.protocol.analysis.allocator.settings import Settings
from ftmon.protocol.analysis.estimates.ranking import Need
from ftmon.protocol.analysis.estimates.time import Communication, Operation, Work, step_time
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import answer, deepspeed_file, jobs, recipe, what_if
from ftmon.trainer.predict.ranks import Outcome, RankRun
from ftmon.trainer.predict.result import Made, Phase, Point, Prediction, Rank, WhatIf
from ftmon.trainer.recipe.config.schema import Config
from ftmon.trainer.recipe.data.batches import Collate, Order

RANKS = 2
RANKS_OF_CONFIG = 3
CHECKPOINTED = "model.gradient_checkpointing=layers"


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"]
    lines = [" ".join(words[(row + place) % 9] for place in range(3 + row * 7 % 60)) for row in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (tmp_path / "train.yaml").write_text(
        f"""
model: {{config: {{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1,
         num_attention_heads: 2, num_key_value_heads: 2}}}}
tokenizer: {{vocab_size: 300}}
data: {{path: {tmp_path / "data.jsonl"}, packing: false}}
training: {{sequence_length: 96, micro_batch: 2, grad_accumulation: 2, epochs: 1}}
"""
    )
    return recipe.read(str(tmp_path / "train.yaml"), [], RANKS, [])


def needs(limit: int) -> Callable[[list[int]], list[Need]]:
    """Return what says that a token takes a byte."""
    return lambda lengths: [Need(length, [length <= limit]) for length in lengths]


def test_steps_that_do_not_fit_are_those_whose_batches_are_too_long(packed):
    records, examples = what_if.read(packed)
    collate = Collate(0, packed.training.sequence_length)
    longest: dict[int, int] = {}
    for rank in range(RANKS):
        order = iter(Order(examples, packed, rank, RANKS))
        for step in range(1, what_if.steps_an_epoch(packed, examples) + 1):
            for _ in range(packed.training.grad_accumulation):
                width = collate([examples.rows[row] for row in next(order)])["input_ids"].shape[1]
                longest[step] = max(longest.get(step, 0), width)
    assert len(set(longest.values())) > 3
    limit = sorted(set(longest.values()))[-3]

    risk = what_if.find(packed, records, examples, limit, needs(limit))
    failing = [step for step, length in longest.items() if length > limit]
    assert (risk.steps, risk.largest_length, risk.failing_steps) == (len(longest), limit, len(failing))
    assert [step.step for step in risk.failing] == failing[:3]
    assert risk.longest.length == max(longest.values())
    first = risk.failing[0]
    assert first.length == longest[first.step]
    assert max(int(examples.tokens[row]) for row in first.rows) > first.length - 8
    assert all("data.jsonl:" in place for place in first.places)

    fitting = what_if.find(packed, records, examples, 1 << 20, needs(1 << 20))
    assert (fitting.failing_steps, fitting.failing, fitting.largest_length) == (0, [], max(longest.values()))


MODEL = "model: {config: {model_type: llama, vocab_size: 512, hidden_size: 64}}\n"


def given(**named: Any) -> argparse.Namespace:
    empty = ("config", "model", "deepspeed", "ranks", "micro_batch", "accumulation", "lora_rank", "optimizer")
    arguments: dict[str, Any] = {**dict.fromkeys(empty), "checkpointing": False, "data": False}
    return argparse.Namespace(**{**arguments, "overrides": [], "sequence_length": [64], "gpu": "H200", **named})


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "d.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "c.yaml").write_text(
        f"{MODEL}data: {{path: {tmp_path}/d.jsonl}}\n"
        "training: {micro_batch: 4, grad_accumulation: 1}\nzero: {stage: 2}\nrun: {ranks: 3}\n"
    )
    return str(tmp_path / "c.yaml")


def changes(arguments: argparse.Namespace) -> dict[str, str]:
    return {one.name: one.change for one in what_if.remedies(arguments, Settings())}


def test_changes_of_a_configuration_are_assignments_and_what_a_run_has_already_is_none(config):
    found = changes(given(config=config))
    assert {
        "checkpointing": "model.gradient_checkpointing=layers",
        "ZeRO 3": "zero.stage=3",
        "micro-batch 2": "training.micro_batch=2 training.grad_accumulation=2",
        "optimizer offload": "zero.offload_optimizer=true",
    }.items() <= found.items()
    assert not {"ZeRO 2", "parameter offload"} & found.keys()
    has = [CHECKPOINTED, "lora.rank=8", "zero.stage=3", "training.micro_batch=1"]
    found = changes(given(config=config, overrides=has))
    assert "parameter offload" in found
    assert found["nothing kept gathered"].startswith("deepspeed.zero_optimization.stage3_max_live_parameters=0 ")
    assert not {"checkpointing", "LoRA of rank 16", "ZeRO 3", "micro-batch 2"} & set(found)


def test_what_is_faster_is_a_change_too(config):
    """Nothing of these changes the batch of a step."""
    slow = [CHECKPOINTED, "zero.stage=3", "zero.offload_optimizer=true", "data.packing=true"]
    slow += ["training.grad_accumulation=4", "model.compile=off"]
    assert {
        "micro-batch 8": "training.micro_batch=8 training.grad_accumulation=2",
        "no checkpointing": "model.gradient_checkpointing=none",
        "compiled layers": "model.compile=layers",
        "no offload": "zero.offload_optimizer=false zero.offload_parameters=false",
        "ZeRO 2": "zero.stage=2",
    }.items() <= changes(given(config=config, overrides=slow)).items()
    assert not {"no checkpointing", "no offload", "micro-batch 8"} & changes(given(config=config)).keys()


def test_a_base_that_is_loaded_may_be_held_in_4_bits(config, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # its name is not looked up
    named = Path(config).with_name("named.yaml")
    named.write_text(Path(config).read_text().replace(MODEL, "model: {name: someone/model}\n"))
    assert changes(given(config=str(named)))["QLoRA of rank 16"] == "lora.rank=16 model.quantization=nf4"
    assert changes(given(config=str(named), overrides=["lora.rank=4"]))["QLoRA"] == "model.quantization=nf4"
    assert "QLoRA of rank 16" not in changes(given(config=config)), "random weights are not quantized"


@pytest.mark.parametrize(
    ("more", "uncompiled", "beside", "after"),
    [
        ([], {"selective checkpointing"}, {"LoRA of rank 16"}, {"optimizer in bf16"}),
        (["training.precision=fp32"], set(), set(), set()),  # ranks differ
        (["data.packing=false"], {"selective checkpointing", "LoRA of rank 16", "optimizer in bf16"}, set(), set()),
        ([CHECKPOINTED], set(), {"LoRA of rank 16"}, {"optimizer in bf16", "no checkpointing"}),
    ],
)
def test_changes_run_after_the_unchanged_run_where_they_compile_its_layers(config, more, uncompiled, beside, after):
    own = ["training.precision=bf16", "model.config.num_hidden_layers=8", "zero.stage=1"]
    arguments = given(config=config, overrides=[*own, *more])
    found = what_if.further(arguments, Settings(), jobs.prepare(arguments, Settings()), 0)
    assert uncompiled <= found.uncompiled.keys()
    for some, every in ((beside, found.beside), (after, found.after)):
        assert some <= every.keys()
        assert bool(some) == bool(every)


def test_changes_of_a_script_are_flags_and_keys_of_its_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4}'
    )
    (tmp_path / "m.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    arguments = given(model=str(tmp_path / "m.json"), deepspeed=str(file), ranks=2)
    found = {one.name: one for one in what_if.remedies(arguments, Settings())}
    assert found["checkpointing"].change == "--checkpointing"
    assert (found["ZeRO 3"].change, found["ZeRO 3"].prepare().stage) == ("zero_optimization.stage=3", 3)
    assert found["optimizer offload"].prepare().offload
    half = found["micro-batch 2"].prepare()
    assert (half.micro_batch, half.accumulation) == (2, 2)
    # The run as it is stays as it is.
    assert jobs.prepare(arguments, Settings()).stage == 1
    assert deepspeed_file.read(str(file))["zero_optimization"] == {"stage": 1}


def test_every_change_is_one_that_the_trainer_takes_and_they_are_joined_unless_they_set_the_same_key(config):
    found = {one.name: one for one in what_if.remedies(given(config=config), Settings())}
    for name, one in found.items():
        job = one.prepare()
        assert job.micro_batch * job.accumulation * job.ranks == 12, name
        assert job.stage == (int(name[-1]) if name.startswith("ZeRO") else 2)
    joined = what_if.joined(given(config=config), Settings(), [found["checkpointing"], found["ZeRO 3"]])
    assert (joined.name, joined.prepare().stage) == ("checkpointing + ZeRO 3", 3)
    assert what_if.joined(given(config=config), Settings(), [found["ZeRO 3"], found["ZeRO 3"]]) is None


def test_remedies_are_joined_where_none_fits_alone_though_one_is_refused(config, monkeypatch):
    def predict(job: jobs.Prepared, capacity: int) -> Prediction | ConfigError:
        if job.stage == 3:
            return ConfigError("refused")
        saved = 40 * job.offload + 40 * (job.micro_batch < 4)
        needed = 150 - saved
        rank = Rank(0, {"backward": Phase(needed, needed)}, 0, needed)
        point = Point(64, job.micro_batch, [rank], 0, needed, needed <= capacity, needed_bytes=needed)
        return Prediction("m", 1, 3, [point])

    def each(of: list[jobs.Prepared], capacity: int, price: float | None, rank: int, tell: Any) -> list[Any]:
        assert (price, rank) == (None, 0)
        for number in range(len(of)):
            tell(number)
        return [predict(job, capacity) for job in of]

    monkeypatch.setattr(answer, "predict_each", each)
    arguments = given(config=config, price=None)
    base = predict(jobs.prepare(arguments, Settings()), 100)
    assert isinstance(base, Prediction)
    told: list[str] = []
    (point,) = base.points
    expanded = msgspec.structs.replace(base, points=[msgspec.structs.replace(point, needed_bytes=120)])
    both = answer.Both(base, expanded, {0: RankRun(outcomes=[Outcome(64, point.ranks[0])])})
    rows = what_if.table(arguments, Settings(), both, 100, told.append)
    assert what_if.expandable(Settings(expandable_segments=True)) is None
    (segments,) = [row for row in rows if row.change == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    assert (segments.fits, segments.needed_bytes, segments.saved_bytes) == (False, 120, 30)
    assert told[0].endswith(f" (1 of {len(rows) - 2} dry runs)"), "without a known time nothing is fitted"
    assert told[-1] == f"what if: {next(row.name for row in rows if row.fits)} (1 of 1 dry runs)"
    assert [row.name for row in rows if row.refused] == ["ZeRO 3"]
    (fits,) = [row for row in rows if row.fits]
    assert set(fits.name.split(" + ")) == {"micro-batch 2", "optimizer offload"}


PARAMETERS, ACTIVATIONS = 12_000, 4_000
PARTS = {"parameters": 2 * PARAMETERS, "activations": ACTIVATIONS, "temporaries": 3_000, "other": 500}
MADE = Made(1_000, 2, 64, 512, 2, 4, 2, False, False, False, 100, 2)
RANK = Rank(0, {"backward": Phase(110_000, 112_000, PARTS)}, 0, 112_000)
WORK = Work([Operation(1e12, 1e6), Operation(0.0, 1e6, memory="update")], [], 10)
RUN = RankRun(PARAMETERS, PARAMETERS, made=MADE, outcomes=[Outcome(64, RANK, work=WORK)])
"""An unchanged run of micro-batch 4 under ZeRO-2 on three ranks."""


@pytest.fixture
def fitted(config: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, WhatIf]]:
    """Return what returns the changes at a capacity, with refusals in place of dry runs."""
    monkeypatch.setattr(answer, "predict_each", lambda of, *_: [ConfigError("run dry")] * len(of))
    rank = RUN.outcomes[0].rank
    point = Point(64, 4, [rank] * 3, 0, 112_000, True, needed_bytes=112_000, step_seconds=1.0)
    both = answer.Both(Prediction("m", PARAMETERS, 3, [point]), None, {0: RUN})

    def at(capacity: int) -> dict[str, WhatIf]:
        rows = what_if.table(given(config=config, price=None), Settings(), both, capacity, lambda _: None)
        return {row.name: row for row in rows}

    return at


def test_changes_follow_from_the_parts_of_the_unchanged_run_where_they_show_them(fitted):
    rows = fitted(1 << 30)
    run_dry = {name for name, row in rows.items() if row.refused}
    assert run_dry == {"selective checkpointing", "LoRA of rank 16"}
    assert all(row.fitted for name, row in rows.items() if name not in run_dry)
    # Of the last rank, whose partition fills in one micro-step while a rank's share of the activations is freed.
    freed = ACTIVATIONS / RANKS_OF_CONFIG
    assert rows["micro-batch 2"].saved_bytes == pytest.approx(ACTIVATIONS // 2 - freed, abs=1)
    partition = 4 * PARAMETERS // RANKS_OF_CONFIG  # which DeepSpeed copies to the host, too
    seen = rows["optimizer offload"].saved_bytes
    assert seen == pytest.approx(12 * PARAMETERS // RANKS_OF_CONFIG + partition - freed, abs=1)
    assert rows["optimizer in bf16"].saved_bytes == 4 * PARAMETERS // RANKS_OF_CONFIG
    assert rows["checkpointing"].step_seconds > 1.0


def test_a_change_whose_fitted_need_is_near_the_capacity_is_run_dry(fitted):
    need = fitted(1 << 30)["micro-batch 2"].needed_bytes
    for share, is_fitted in ((0.95, False), (1.05, False), (0.9, True), (1.1, True)):
        row = fitted(round(share * need))["micro-batch 2"]
        assert row.fitted == is_fitted
        assert not is_fitted or row.fits == (share > 1)


SHARE = 2 * PARAMETERS // RANKS_OF_CONFIG
GATHERED, ONE_LAYER, LAYERS = 6_000, 2_000, 10


def partitioned(
    config: str, monkeypatch: pytest.MonkeyPatch, gathers: int, shallow: dict[str, list[RankRun]] | None = None
) -> dict[str, WhatIf]:
    """Return the changes of a run under ZeRO-3 that gathers its parameters so often in a micro-step."""
    monkeypatch.setattr(answer, "predict_each", lambda of, *_: [ConfigError("run dry")] * len(of))
    monkeypatch.setattr(what_if, "LIVE_PARAMETERS", PARAMETERS if gathers == 1 else PARAMETERS - 1)
    parts = {"parameters": SHARE + GATHERED, "activations": 20_000}
    size = sum(parts.values())
    rank = Rank(0, {"backward": Phase(size, size, parts)}, 500, size)
    sent = Communication("all_gather", 2.0 * PARAMETERS, RANKS_OF_CONFIG, True, gathers)
    assert RUN.made is not None
    run = msgspec.structs.replace(
        RUN,
        made=msgspec.structs.replace(RUN.made, layers=LAYERS),
        outcomes=[Outcome(64, rank, work=Work([Operation(1e13, 1e6)], [sent], 10))],
    )
    point = Point(64, 4, [rank] * 3, 1_500, size, True, needed_bytes=size, step_seconds=1.0)
    both = answer.Both(Prediction("m", PARAMETERS, 3, [point]), None, {0: run})
    arguments = given(config=config, price=None, overrides=["zero.stage=3"])
    rows = what_if.table(arguments, Settings(), both, 1 << 30, lambda _: None, [lambda _: shallow or {}])
    return {row.name: row for row in rows}


def test_parameters_on_the_host_or_gathered_again_follow_from_the_parts_of_the_unchanged_run(config, monkeypatch):
    rows = partitioned(config, monkeypatch, gathers=2)
    offload, released = rows["parameter offload"], rows["nothing kept gathered"]
    assert offload.fitted
    assert released.fitted
    assert (offload.saved_bytes, offload.host_bytes) == (SHARE, 500 + 2 * SHARE)
    assert offload.step_seconds > released.step_seconds == pytest.approx(1.0)
    assert (released.saved_bytes, released.host_bytes) == (GATHERED - ONE_LAYER, 500)
    rows = partitioned(config, monkeypatch, gathers=1)
    assert rows["nothing kept gathered"].refused == "run dry"
    assert rows["parameter offload"].fitted


def few(layers: int, of_layer: int) -> RankRun:
    """Return a run with adapters in so many layers."""
    phases = {"backward": Phase(5_000 + 700 * layers, 0)}
    work = Work([Operation(1e12 * layers, 1e6)], [], 4 * layers)
    outcome = Outcome(64, Rank(0, phases, 10 * layers, 5_300 + 700 * layers), work=work)
    return RankRun(2_000 + (of_layer + 100) * layers, 100 * layers, outcomes=[outcome])


def test_a_change_is_fitted_to_a_layer_and_two_of_it_if_they_make_up_the_unchanged_model(config, monkeypatch):
    of_layer = (PARAMETERS - 2_000) // LAYERS
    rows = partitioned(config, monkeypatch, 1, {"LoRA of rank 16": [few(1, of_layer), few(2, of_layer)]})
    adapted = rows["LoRA of rank 16"]
    assert adapted.fitted
    assert (adapted.needed_bytes, adapted.host_bytes) == (5_000 + 700 * LAYERS + 300, 10 * LAYERS)
    whole = step_time(Work([Operation(1e12 * LAYERS, 1e6)], [], 4 * LAYERS), jobs.find("H200"))
    assert adapted.step_seconds == pytest.approx(whole.total.value)
    others = partitioned(config, monkeypatch, 1, {"LoRA of rank 16": [few(1, of_layer - 1), few(2, of_layer - 1)]})
    assert others["LoRA of rank 16"].refused == "run dry"


def test_more_ranks_than_can_be_gone_through_are_refused_and_more_tokens_than_the_model_has_noted(tmp_path, config):
    (tmp_path / "m.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_positions": 512}')
    arguments = given(model=str(tmp_path / "m.json"), sequence_length=[256, 2048])
    (note,) = [note for note in jobs.prepare(arguments, Settings()).notes if "tokens" in note]
    assert note == "2,048 tokens are more than the model's n_positions, 512"
    arguments.ranks = 100_000
    with pytest.raises(ConfigError, match=r"^--ranks: predictions support up to 4,096 ranks, not 100,000$"):
        jobs.prepare(arguments, Settings())
    with pytest.raises(ConfigError, match=r"run\.ranks: predictions support up to 4,096 ranks, not 5,000$"):
        jobs.prepare(given(config=config, overrides=["run.ranks=5000"]), Settings())
