"""Evaluation on real ranks: exact over all label tokens, on every number of ranks, and without effect on training."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

import small_runs
import torch
from transformers import AutoModelForCausalLM

# Seven rows and micro-batches of two: batches divide evenly neither by rows nor by ranks.
HELD_OUT = [1, 90, 2, 3, 40, 1, 17]
TRAIN = "training={max_steps: 4, micro_batch: 2, grad_accumulation: 1, sequence_length: 256}"
TWO = "training={max_steps: 4, micro_batch: 1, grad_accumulation: 1, sequence_length: 256}"


def write_repository(folder: Path, records: Path) -> None:
    """Write a data set with two splits in parquet files, named in its card."""
    from pyarrow import json, parquet

    card = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, source in (("train", "data.jsonl"), ("validation", "eval.jsonl")):
        (folder / "data").mkdir(parents=True, exist_ok=True)
        parquet.write_table(json.read_json(records / source), folder / "data" / f"{split}-00000-of-00001.parquet")
        card += [f"  - split: {split}", f"    path: data/{split}-*.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


class Outcome:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        small_runs.write_model(folder)
        small_runs.write_records(folder / "data.jsonl", [5, 60, 7, 1, 9, 30, 2, 11])
        small_runs.write_records(folder / "eval.jsonl", HELD_OUT)
        data = [f"evaluation.path={folder}/eval.jsonl", "optimizer.lr=1e-2"]
        often = ["evaluation.every=2", "evaluation.micro_batch=2"]
        samples = ["evaluation.samples=1", "evaluation.sample_tokens=4"]
        plain = ["zero.stage=1", *samples]
        small_runs.write_records(folder / "many.jsonl", [1 + row % 7 for row in range(1_000)])
        write_repository(folder / "poems", folder)
        best = [TWO, *data, "evaluation={every: 1, patience: 1}", "optimizer.lr=10", "output.save_model=true"]
        (folder / "out" / "last").mkdir(parents=True)
        named = ["data.path=", f"data.name={folder}/poems"]
        self.text = small_runs.launch(
            folder,
            "evaluation_ranks",
            {
                "none": (1, [TRAIN, "optimizer.lr=1e-2"]),
                "one": (1, [TRAIN, *data, *often, *plain]),
                "patience": (
                    1,
                    [TRAIN, *data, "evaluation={every: 1, patience: 1}", "optimizer.lr=10", "output.save_model=true"],
                ),
                "best-z3": (2, [*best, "zero.stage=3"]),
                "best-lora": (2, [*best, "zero.stage=2", "lora.rank=4"]),
                "last": (2, [*best, "zero.stage=2", "output.load_best=false"]),
                # It resumes from the best step of a run elsewhere, and finds nothing better.
                "resumed": (2, [*best, "zero.stage=2", f"checkpoint.resume={folder}/out/last"]),
                "best-at-end": (1, [TRAIN, *data, "evaluation.every=2", "output.save_model=true"]),
                "share": (1, [TRAIN, "evaluation={share: 0.25, every: 0}", "data.packing=false"]),
                # A data set of the hub by its name: a folder, read as a repository is, with the same records.
                "split": (1, [TRAIN, *named, "evaluation.split=validation", "optimizer.lr=1e-2", *often, *plain]),
                "two": (2, [TWO, *data, *often, "zero.stage=2"]),
                "shared": (2, [TRAIN, *data, *often, *samples, "zero.stage=2", "training.sequence_parallel_size=2"]),
                "by-default": (
                    2,
                    [
                        f"data.path={folder}/many.jsonl",
                        "training={max_steps: 11, sequence_length: 256}",
                        "optimizer.lr=1e-2",
                    ],
                ),
                "partitioned": (2, [TWO, *data, *often, *samples, "zero.stage=3", "model.fused_loss=off"]),
            },
        )
        self.saved: dict[str, Any] = {path.stem: torch.load(path) for path in folder.glob("*.pt")}

    def results(self, name: str) -> dict[int, tuple[float, float, int]]:
        found = re.findall(
            r"^evaluation after step (\d+): loss (\S+)  perplexity (\S+)  ([\d,]+) tokens",
            self.text[name],
            re.MULTILINE,
        )
        return {
            int(step): (float(loss), float(perplexity.replace(",", "")), int(tokens.replace(",", "")))
            for step, loss, perplexity, tokens in found
        }

    def reference(self, name: str, exported: Path | None = None) -> tuple[float, int]:
        """Return the loss of the last weights, or the exported ones, one row and token at a time, and its tokens."""
        model: Any = AutoModelForCausalLM.from_pretrained(exported or self.folder / "base", dtype=torch.float64)
        if exported is None:
            model.load_state_dict(self.saved[name]["weights"])
        losses: list[float] = []
        for row in self.saved[name]["rows"]:
            with torch.no_grad():
                logits = torch.log_softmax(model(input_ids=torch.tensor([row["input_ids"]])).logits[0], -1)
            losses += [
                -float(logits[place - 1, label]) for place, label in enumerate(row["labels"]) if place and label != -100
            ]
        return sum(losses) / len(losses), len(losses)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return Outcome(tmp_path_factory.mktemp("evaluation"))


@pytest.mark.parametrize("name", ["one", "two", "shared", "partitioned"])
def test_the_loss_is_that_of_each_label_token_once(outcome: Outcome, name: str) -> None:
    assert len(outcome.saved[name]["rows"]) == len(HELD_OUT)
    results = outcome.results(name)
    assert list(results) == [2, 4]
    loss, tokens = outcome.reference(name)
    assert results[4] == (pytest.approx(loss, abs=6e-5), pytest.approx(2.718281828459045**loss, rel=1e-3), tokens)
    assert results[4][0] < results[2][0]


def test_a_split_of_a_named_data_set_is_evaluated_as_a_file_and_evaluating_changes_no_weight(outcome):
    assert outcome.saved["split"]["rows"] == outcome.saved["one"]["rows"]
    assert len(outcome.saved["split"]["rows"]) == len(HELD_OUT)
    assert outcome.results("split") == outcome.results("one")
    for name, weight in outcome.saved["none"]["weights"].items():
        assert torch.equal(outcome.saved["one"]["weights"][name], weight), name


def test_training_stops_when_patience_is_at_its_end_and_a_best_last_model_needs_no_checkpoint(outcome):
    text = outcome.text["patience"]
    last = max(outcome.results("patience"))
    assert last < 4
    assert f"stopped early after step {last}: 1 evaluations without a new lowest loss" in text
    assert f"finished: {last} steps" in text
    assert sorted(outcome.results("best-at-end")) == [2, 4]
    checkpoints = outcome.folder / "out" / "best-at-end" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-2"]
    assert "the model of step 4\n" in outcome.text["best-at-end"]


@pytest.mark.parametrize("name", ["patience", "best-z3", "best-lora", "last"])
def test_the_best_evaluation_has_a_checkpoint_and_is_exported_or_named(outcome: Outcome, name: str) -> None:
    results = outcome.results(name)
    last = max(results)
    best = min(results, key=lambda step: results[step][0])
    assert best < last
    folder = outcome.folder / "out" / name
    # Each that was the best has one, and checkpoint.keep is 2; at so high a rate the first may not be the best.
    bests = [step for step in sorted(results) if results[step][0] == min(results[one][0] for one in range(1, step + 1))]
    seen = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert seen == [f"step-{one}" for one in bests[-2:]]
    loss = f"the lowest evaluation loss, {results[best][0]:.4f}"
    words = f"the model of step {best}, {loss}\n"
    if name == "last":
        words = f"the model of step {last}; step {best} has {loss}: {folder}/checkpoints/step-{best}\n"
    assert words in outcome.text[name]
    card = (folder / "model" / "README.md").read_text()
    assert f"| best evaluation loss | {results[best][0]:.4f} (step {best}) |" in card
    assert (f"; the model is that of step {best} |" in card) == (name != "last")
    exported = outcome.reference(name, folder / "model")[0]
    assert exported == pytest.approx(results[last if name == "last" else best][0], rel=1e-6, abs=6e-5)


def test_the_best_evaluation_of_the_run_that_this_one_resumed_from_is_exported(outcome: Outcome) -> None:
    before = outcome.results("last")
    best = min(before, key=lambda step: before[step][0])
    assert min(outcome.results("resumed")) > best
    assert f"the model of step {best}, the lowest evaluation loss, {before[best][0]:.4f}\n" in outcome.text["resumed"]
    exported = outcome.reference("resumed", outcome.folder / "out" / "resumed" / "model")[0]
    assert exported == pytest.approx(before[best][0], rel=1e-6, abs=6e-5)


def test_a_share_is_set_aside_and_of_large_data_evaluated_ten_times_at_most(outcome):
    assert "6 examples, 2 a step" in outcome.text["share"]
    assert (len(outcome.saved["share"]["rows"]), list(outcome.results("share"))) == (2, [4])
    text, results = outcome.text["by-default"], outcome.results("by-default")
    assert "evaluation.every 2 steps on 20 examples held out (evaluation.share 0.02); the last step is exported" in text
    assert list(results) == [2, 4, 6, 8, 10, 11]
    loss, tokens = outcome.reference("by-default")
    assert results[11] == (pytest.approx(loss, abs=6e-5), pytest.approx(2.718281828459045**loss, rel=1e-3), tokens)
    assert "no evaluation" in outcome.text["none"]
    # Packed rows of 256 tokens, a tenth of an epoch's at most in a step.
    rows = re.search(r"packing: (\d+) rows", text)
    assert rows is not None
    steps = re.search(r"training.grad_accumulation (\d+) \(1 x (\d+) x 2 = (\d+) sequences a step\)", text)
    step = int(steps[3])
    assert (int(steps[1]), step) == (int(steps[2]), 2 * int(steps[2]))
    assert step * 10 <= int(rows[1]) < step * 20


def test_samples_are_answers_to_the_prompt_alone(outcome: Outcome) -> None:
    for name in ("one", "shared", "partitioned"):
        prompts = re.findall(r"^sample: '(.*)' -> ", outcome.text[name], re.MULTILINE)
        assert len(prompts) == 2
        assert prompts[0].endswith("<|assistant|>")
