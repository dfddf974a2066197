"""``ftmon data check`` finds each planted fault, and nothing in clean data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ftmon.trainer.recipe.data_check import show
from ftmon.trainer.recipe.data_check.__main__ import main
from ftmon.trainer.recipe.data_check.check import Finding
from planted_faults import CLEAN, FAULTS, Case, tokenizers, words

Check = Callable[..., tuple[int, str, str]]
PAIRS = CLEAN["prompts and responses"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    return tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture
def check(tmp_path: Path, folders: Any, capsys: pytest.CaptureFixture[str]) -> Check:
    """Check a case with more words of the command line; return the exit status, the output and the errors."""

    def run(case: Case, *more: str) -> tuple[int, str, str]:
        return main([*words(case, tmp_path, folders[case.template]), *more]), *capsys.readouterr()

    return run


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, check):
    case = FAULTS[name]
    status, out, err = check(case, "--json")
    assert (status, err) == (2 if case.kind == "unusable" else 1, "")  # no training starts with an unusable template
    findings = {finding["kind"]: finding for finding in json.loads(out)["findings"]}
    assert case.kind in findings, findings
    found = findings[case.kind]
    assert case.detail in found["text"] + "".join(f"\n{place}: {detail}" for place, detail in found["first"])


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_clean_data(name, check):
    status, out, err = check(CLEAN[name], "--json")
    report = json.loads(out)
    assert (status, report["findings"], err) == (0, [], "")
    facts = report["facts"]
    assert facts["ends_learned"] == facts["turns"] > 0
    assert facts["bos_counts"] == {"1": 5}


def test_trained_tokens_are_marked_with_and_without_colour(check):
    case = CLEAN["chats of several turns with a system message"]
    status, plain, _ = check(case, "--ascii", "--samples", "1")
    assert status == 0
    assert "[[Red is one.<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\\n\n\\n\nGo on" in plain
    assert "data.jsonl:2" not in plain
    assert "ends of turns: 10 of 10 learned" in plain
    assert "records by tokens" in plain
    assert plain.endswith("nothing found\n")
    assert plain.isascii()
    status, coloured, _ = check(case, "--color")
    assert status == 0
    assert "\033[30;42m" in coloured


def test_what_is_wrong_is_told_with_lines_and_what_to_do(check, tmp_path):
    status, shown, _ = check(FAULTS["a broken line"], "--ascii")
    fix = "repair or remove them: no training starts with more than 1.00% (data.max_refused)"
    assert status == 1
    assert f"1 record is refused; {fix}  (refused)\n    data.jsonl:6: is not JSON" in shown
    (tmp_path / "held-out.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": null}\n')
    status, shown, _ = check(PAIRS, f"evaluation.path={tmp_path}/held-out.jsonl")
    assert status == 1
    assert "1 record is refused in the evaluation's data; repair" in shown
    assert "held-out.jsonl:2: response is null" in shown


def test_names_and_reasons_cannot_command_a_terminal_with_colour():
    found = Finding("refused", 1, "records are refused", "repair them", [("a\x1b]0;x\x07.jsonl:1", "bad \x9b2J")])
    shown = show._findings([found], show.Painter(colour=True, ascii_only=False, width=80))
    assert "a\\x1b]0;x\\x07.jsonl:1: bad \\x9b2J" in shown


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.pth=x"], "unknown key data.pth"),
        (["data.path=/nowhere.jsonl"], "data.path /nowhere.jsonl: no such file"),
        (["evaluation.path=/nowhere.jsonl"], "evaluation.path /nowhere.jsonl: no such file"),
        (["evaluation.path={broken}"], "evaluation.path {broken}: line 1 is not JSON"),
        (["training={micro_batch: 2, total_batch: 7}"], "training.total_batch is 7, but micro_batch 2"),
        (["training={total_batch: 7, grad_accumulation: 1}", "run.ranks=2"], "x 2 ranks is 2"),
        (["training={total_batch: 7, grad_accumulation: 1}", "run.device=cpu"], "x 1 rank is 1"),
        (["deepspeed.foo=1"], "deepspeed.foo is not a key of DeepSpeed"),
        (["model.config.model_type=nope"], "model.config.model_type: Unrecognized model identifier: nope"),
        (["model.config.max_position_embeddings=8", "model.config.model_type=opt"], "max_position_embeddings, 8"),
        (["lora.kind=dora"], "lora.kind needs lora.rank above 0"),
    ],
)
def test_what_no_training_would_start_with_is_one_line_and_status_2(settings, said, tmp_path, check):
    broken = tmp_path / "broken.jsonl"
    broken.write_text("a\n")
    status, out, err = check(PAIRS, *(word.replace("{broken}", str(broken)) for word in settings))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert said.replace("{broken}", str(broken)) in err


def test_wrong_usage_is_status_2_and_unknown_ranks_are_those_that_the_batch_asks_for(tmp_path, capsys, check):
    assert main([f"{tmp_path}/no.yaml"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2
    status, out, _ = check(PAIRS, "training={micro_batch: 2, total_batch: 4}", "--json")
    assert (status, json.loads(out)["facts"]["rows_a_step"]) == (0, 4)
    assert check(PAIRS, "training.sequence_parallel_size=2", "run.device=auto")[0] == 0
