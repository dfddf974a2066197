"""What a person may name for a chat, and which of several runs is meant."""

import pytest
from ftmon.protocol.errors import SeveralRunsError, UsageError
from ftmon.protocol.run import rundir
from ftmon.trainer.recipe.chat import adapters, session


def trained(name: str) -> str:
    run = rundir.create(name, ["train"], "train")
    run.config.write_text("")
    (run.path / "output" / "model").mkdir(parents=True)
    (run.path / "output" / "model" / "config.json").write_text("{}")
    return run.id


@pytest.mark.parametrize("size", [1, 2, 3, 40])
def test_an_answer_ends_before_the_first_stop_however_it_is_cut_into_tokens(size):
    answer, stops = "a # b ### c ### Human: d", ["### Human:", "\nUser"]
    shown, held, is_stopped = "", "", False
    for begin in range(0, len(answer), size):
        text, held, is_stopped = session.before_stop(held + answer[begin : begin + size], stops)
        shown += text
        assert "### H" not in shown
        if is_stopped:
            break
    assert (shown, held, is_stopped) == ("a # b ### c ", "", True)
    assert session.before_stop("done ##", stops) == ("done ", "##", False)
    assert session.before_stop("done ##", []) == ("done ##", "", False)


def test_answers_are_shown_in_columns_or_below_each_other():
    answers = {"base": "one two three four five six seven", "poems": "a\n\nb"}
    lines = adapters.side_by_side(answers, 45).splitlines()
    assert lines == [
        "base                  |  poems", "--------------------  |  --------------------",
        "one two three four    |  a", "five six seven        |", "                      |  b",
    ]  # fmt: skip
    assert adapters.side_by_side(answers, 30) == "base:\none two three four five six seven\n\npoems:\na\n\nb"


def test_the_run_that_was_taken_is_named_and_a_name_of_several_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    one = trained("demo")
    found = session.find("dem")
    assert found.text == f"{one}: {found.path}"
    two = trained("demo")
    with pytest.raises(SeveralRunsError) as raised:
        session.find("demo")
    assert all(identifier in str(raised.value) for identifier in (one, two))
    with pytest.raises(UsageError, match="no such run, folder or model; 'ftmon ls' lists runs"):
        session.find("other")


def test_a_folder_without_a_model_and_a_name_on_an_unreachable_hub_are_refused(tmp_path, monkeypatch):
    for name, value in {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"holds neither a model \(config.json\) nor a complete checkpoint"):
        session.find(str(tmp_path))
    with pytest.raises(UsageError, match=r"^me/model: cannot reach 127.0.0.1 .*, and the cache has no copy"):
        session.find("me/model")
