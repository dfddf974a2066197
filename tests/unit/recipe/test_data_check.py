"""``ftmon data check`` finds each planted fault, and nothing in clean data."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from ftmon.trainer.recipe.data.check.__main__ import main
from planted_faults import CLEAN, FAULTS, Case, tokenizers, words


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> "dict[str | None, Path]":
    return tokenizers(tmp_path_factory.mktemp("tokenizers"))


def checked(case: Case, folder: Path, folders: Any, capsys: pytest.CaptureFixture[str]) -> "tuple[int, dict[str, Any]]":
    status = main(["--json", *words(case, folder, folders[case.template])])
    output = capsys.readouterr()
    assert not output.err, output.err
    return status, json.loads(output.out)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, folders: Any, capsys: pytest.CaptureFixture[str]) -> None:
    case = FAULTS[name]
    status, report = checked(case, tmp_path, folders, capsys)
    assert status == 1
    findings = {finding["kind"]: finding for finding in report["findings"]}
    assert case.kind in findings, report["findings"]
    found = findings[case.kind]
    shown = found["text"] + "".join(f"\n{place}: {detail}" for place, detail in found["first"])
    assert case.detail in shown


@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_in_clean_data(
    name: str, tmp_path: Path, folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = checked(CLEAN[name], tmp_path, folders, capsys)
    assert (status, report["findings"]) == (0, [])
    facts = report["facts"]
    assert facts["ends_learned"] == facts["turns"] > 0
    assert facts["bos_counts"] == {"1": 5}


def test_at_least_twenty_faults_and_five_clean_sets_are_tried() -> None:
    assert len(FAULTS) >= 20
    assert len(CLEAN) >= 5


def test_trained_tokens_are_marked_with_and_without_colour(
    tmp_path: Path, folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CLEAN["chats of several turns with a system message"]
    arguments = words(case, tmp_path, folders[case.template])
    assert main([*arguments, "--ascii", "--samples", "1"]) == 0
    plain = capsys.readouterr().out
    assert "[[Red is one.<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\\n\n\\n\nGo on" in plain
    assert "data.jsonl:2" not in plain
    assert "ends of turns: 10 of 10 learned" in plain
    assert "records by tokens" in plain
    assert plain.endswith("nothing found\n")
    assert plain.isascii()
    assert main([*arguments, "--color"]) == 0
    assert "\033[30;42m" in capsys.readouterr().out


def test_what_is_wrong_is_told_with_lines_and_what_to_do(
    tmp_path: Path, folders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    case = FAULTS["a broken line"]
    assert main([*words(case, tmp_path, folders[case.template]), "--ascii"]) == 1
    shown = capsys.readouterr().out
    assert (
        "1 record is refused; repair or remove them; none is trained on  (refused)\n    data.jsonl:6: is not JSON"
        in shown
    )


def test_a_wrong_configuration_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (
        ["data.pth=x"],
        ["model.config={model_type: qwen2}", "data.path=/nowhere.jsonl"],
        [f"{tmp_path}/no.yaml"],
    ):
        assert main(wrong) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit) as raised:
        main([])
    assert raised.value.code == 2
