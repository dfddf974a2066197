"""Which checkpoint a run resumes from: complete ones only, and what is compared before anything is loaded."""

import math
from pathlib import Path

import msgspec
import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.checkpoint import manifest, restore
from ftmon.trainer.recipe.checkpoint.manifest import File, Manifest
from ftmon.trainer.recipe.config.load import load
from ftmon.trainer.recipe.state import TrainState
from hypothesis import given
from hypothesis import strategies as st

PLACE = {"step": 8, "batches": 9}
SETTINGS = {"seed": 1, "data_key": "k", "examples": 100, "order": "shuffled", "sequence_length": 64}
SIZES = {"micro_batch": 2, "grad_accumulation": 2, "ranks": 4}
STATE = TrainState(**PLACE, **SETTINGS, **SIZES)  # type: ignore[arg-type]


def changed(**values: object) -> TrainState:
    return TrainState(**{**SETTINGS, **SIZES, **values})  # type: ignore[arg-type]


def position(*allowed: str, saved: TrainState = STATE, **values: object) -> tuple[TrainState, list[str]]:
    return restore.position(saved, changed(**values), allowed, Path("c"))


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as raised:
        position(**values)
    return str(raised.value)


def write(
    parent: Path, step: int, time: float, loss: float | None = None, content: bytes = b"weights", key: str = ""
) -> Path:
    path = parent / f"step-{step}"
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(content)
    files = {"model.pt": File(len(content), manifest.checksum(path / "model.pt"))}
    state = TrainState(step=step, evaluation_key=key)
    manifest.write(path, Manifest(time, state, 2, "fp32", {"w": [2, 3]}, ["w"], files, {}, evaluation_loss=loss))
    return path


def test_the_newest_complete_one_comes_first_whatever_its_step(tmp_path):
    for step, time in ((30, 1.0), (10, 3.0), (20, 2.0)):
        write(tmp_path / "checkpoints", step, time)
    found, notes = manifest.candidates("auto", tmp_path)
    assert ([one.path.name for one in found], notes) == (["step-10", "step-20", "step-30"], [])


def test_torn_ones_are_skipped_with_a_note_and_a_flipped_byte_found_by_the_checksum(tmp_path):
    parent = tmp_path / "checkpoints"
    write(parent, 10, 1.0)
    (write(parent, 20, 2.0) / "model.pt").write_bytes(b"weig")
    (write(parent, 30, 3.0) / manifest.NAME).unlink()
    (write(parent, 40, 4.0) / "model.pt").unlink()
    write(parent, 50, 5.0).rename(parent / "step-50.part")
    (parent / manifest.LATEST).write_text("step-40")
    found, notes = manifest.candidates("auto", tmp_path)
    assert [one.path.name for one in found] == ["step-10"]
    assert manifest.damaged(found[0].path, found[0].manifest) == ""
    (found[0].path / "model.pt").write_bytes(b"weighty")  # of the same length
    assert "model.pt is damaged" in manifest.damaged(found[0].path, found[0].manifest)
    assert sorted(notes) == [
        "step-20 is incomplete: model.pt has 4 bytes, not 7",
        "step-30 is incomplete: no manifest.json",
        "step-40 is incomplete: model.pt is missing",
        "step-50.part was not finished",
    ]


BASE = ["model.config={model_type: llama, hidden_size: 64}", "data.path=a.jsonl", "training.max_steps=40"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], []),
        # The same steps in other portions, memory or time, and other outputs.
        (["training={micro_batch: 4, grad_accumulation: 2, rehearsal: false}", "run.ranks=4", "zero.stage=3"], []),
        (["model={compile: layers, gradient_checkpointing: layers}", "optimizer.kind=torch_fused"], []),
        (["evaluation={path: b.jsonl, every: 5}", "checkpoint.every=7", "output={dir: o, log_every: 1}"], []),
        (["data.path=/moved/a.jsonl", "run.name=other", "lora.merge=true"], []),
        (["optimizer.lr=1e-3"], ["optimizer.lr was auto and is 0.001"]),
        (["training.max_steps=41"], ["training.max_steps was 40 and is 41"]),
        (["lora.rank=4"], ["lora.rank was 0 and is 4"]),
        (
            ["optimizer={kind: adamw_8bit, beta2: 0.95}"],
            ["beta2 was 0.999 and is 0.95", "kind was auto and is adamw_8bit"],
        ),
        (["model.config=", "model.name=some/model"], ["model.name was empty and is some/model", "model.config was {"]),
        (
            ["schedule={kind: linear, warmup_steps: 3}"],
            ["kind was cosine and is linear", "warmup_steps was auto and is 3"],
        ),
    ],
)
def test_a_configuration_is_the_same_where_it_makes_the_same_training(tmp_path, words, expected):
    path = write(tmp_path, 10, 1.0)
    before = manifest.read(path)
    assert before is not None
    manifest.write(path, msgspec.structs.replace(before, settings=manifest.identity(load(None, BASE).config)))
    found = manifest.read(path)
    assert found is not None
    assert manifest.changes(before, load(None, [*BASE, *words]).config) == [], "written before these settings existed"
    changes = manifest.changes(found, load(None, [*BASE, *words]).config)
    assert len(changes) == len(expected)
    assert all(text in change for text, change in zip(expected, changes, strict=True))


def test_a_path_without_a_complete_one_is_refused_and_auto_begins_anew(tmp_path):
    with pytest.raises(ConfigError, match="no complete checkpoint is there"):
        manifest.candidates(str(tmp_path), tmp_path)
    assert manifest.candidates("auto", tmp_path) == ([], [])
    write(tmp_path, 10, 1.0)
    (write(tmp_path, 20, 2.0) / "model.pt").unlink()
    with pytest.raises(ConfigError, match=r"step-20 is not a complete checkpoint: .* is missing; complete: step-10"):
        manifest.candidates(str(tmp_path / "step-20"), tmp_path)
    (tmp_path / "step-20" / manifest.NAME).write_text("{}")
    assert manifest.examine(tmp_path / "step-20") == (None, "manifest.json is damaged, or of another version")


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        write(tmp_path, step, float(step), loss)
    for keep_best, kept in ((True, ["step-2", "step-4", "step-5"]), (False, ["step-4", "step-5"])):
        manifest.prune(tmp_path, 2, keep_best)
        assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_an_unchanged_run_or_fewer_ranks_with_more_accumulation_go_on_at_the_same_place():
    assert position() == (STATE, [])
    resumed, notes = position(ranks=2, grad_accumulation=4)
    assert resumed.batches == STATE.batches
    assert "the global batches are the same" in notes[0]
    assert "training.grad_accumulation=4 keeps it" in refusal(ranks=2)
    resumed, (note,) = position(sequence_parallel_size=2, grad_accumulation=4)
    assert (resumed.batches, resumed.sequence_parallel_size) == (STATE.batches, 2)
    assert note.startswith("training.sequence_parallel_size was 1 and is 2: the global batches are the same")
    text = refusal(sequence_parallel_size=4)
    assert "size was 1 and is 4, with 16 examples a step then and 4 now (training.grad_accumulation=8 keeps it)" in text
    assert text.endswith("checkpoint.allow=[ranks]")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", {"seed": 2}), ("data", {"data_key": "other"}), ("data", {"order": "shuffled, grouped by length"}),
        ("sequence_length", {"sequence_length": 32}), ("micro_batch", {"micro_batch": 4}),
        ("grad_accumulation", {"grad_accumulation": 1}), ("ranks", {"ranks": 2}),
    ],
)  # fmt: skip
def test_a_change_is_refused_unless_it_is_allowed(name, values):
    assert refusal(**values).endswith(f"checkpoint.allow=[{name}]")
    resumed, notes = position(name, **values)
    assert (resumed.step, len(notes)) == (STATE.step, 1)
    assert {key: getattr(resumed, key) for key in values} == values


def test_another_global_batch_on_the_same_ranks_says_what_it_means_and_how_to_keep_it():
    text = refusal(micro_batch=4)
    assert "training.micro_batch was 2 and is 4, with 16 examples a step then and 32 now" in text
    assert "(training.grad_accumulation=1 keeps it): global batches have another size" in text
    text = refusal(micro_batch=4, grad_accumulation=1)
    assert "differ from the uninterrupted run's in their last digits" in text
    assert "another size" not in text


@given(st.integers(0, 60), st.sampled_from([1, 2, 4, 8]))
def test_another_global_batch_goes_on_within_the_same_epoch_and_skips_nothing(batches, ranks):
    saved, now = changed(batches=batches), changed(ranks=ranks)
    resumed, _ = position("ranks", saved=saved, ranks=ranks)
    before, after = 100 // saved.global_batch, 100 // now.global_batch
    assert resumed.batches // after == batches // before
    assert resumed.batches % after * now.global_batch <= batches % before * saved.global_batch


@pytest.mark.parametrize(
    ("here", "words"),
    [
        ({"a": [2], "b": [3, 5]}, "b is 3x4 there and 3x5 here"),
        ({"a": [2]}, "b is not here"),
        ({"a": [2], "b": [3, 4], "z": [1]}, "z is not there"),
    ],
)
def test_another_model_is_named_by_its_first_difference(here, words):
    there = {"a": [2], "b": [3, 4]}
    restore.check_parameters(there, dict(there), Path("c"))
    with pytest.raises(ConfigError, match=words):
        restore.check_parameters(there, here, Path("c"))


def test_with_other_evaluation_examples_the_lowest_loss_is_determined_anew(tmp_path):
    rated = {"best_evaluation": 1.5, "best_evaluation_step": 4, "evaluations_without_best": 2}
    saved = msgspec.structs.replace(STATE, evaluation_key="a", **rated)
    for key, wanted in (("a", (1.5, 4, 2)), ("", (1.5, 4, 2)), ("b", (math.inf, 0, 0))):
        now, notes = position(saved=saved, evaluation_key=key)
        assert (now.best_evaluation, now.best_evaluation_step, now.evaluations_without_best) == wanted
        assert now.evaluation_key == (key or "a")
        assert bool(notes) == (key == "b")
    assert "its examples differ from those before" in notes[0]
    for step, loss, key in ((1, 0.5, "a"), (2, 3.0, "b"), (3, 2.0, "b")):
        write(tmp_path, step, float(step), loss, key=key)
    best = manifest.lowest(manifest.complete(tmp_path)[0])
    assert best.path.name == "step-3"
