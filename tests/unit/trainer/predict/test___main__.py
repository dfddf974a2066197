"""What ``ftmon predict`` prints on standard error while it is under way."""

import json

import pytest
from eventually import eventually
from ftmon.trainer.predict import __main__ as predict


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "_SILENT_SECONDS", 0.05)
    monkeypatch.setattr(predict, "_REPEAT_SECONDS", 0.05)


def test_a_quick_prediction_prints_nothing_and_the_app_receives_each_dry_run_as_json(monkeypatch, capfd):
    monkeypatch.setattr(predict, "_SILENT_SECONDS", 60.0)
    with predict.Progress() as tell:
        tell("the run as it is")
    assert capfd.readouterr() == ("", "")
    with predict.Progress(as_json=True) as tell:
        for what in (predict._PREPARING, "the run as it is"):
            tell(what)
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line) == {"predicting": "the run as it is"}


def test_a_long_one_names_each_activity_once_and_then_how_long_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    errors = ""

    def printed(words: str) -> bool:
        nonlocal errors
        output, more = capfd.readouterr()
        assert output == ""
        errors += more
        return words in errors

    with predict.Progress() as tell:
        eventually(lambda: printed("predicting: reading the configuration"), "the first activity")
        tell("what if: LoRA of rank 16 (3 of 8)")
        eventually(lambda: printed("what if: LoRA of rank 16 (3 of 8), "), "how long it takes")
    lines = errors.splitlines()
    assert lines.count("predicting: what if: LoRA of rank 16 (3 of 8)") == 1
    assert any(line.endswith(" so far") for line in lines)
