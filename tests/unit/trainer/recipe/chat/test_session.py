"""What a person may name for a chat, and which of several runs is meant."""

from pathlib import Path

import pytest
from ftmon.protocol.errors import SeveralRunsError, UsageError
from ftmon.protocol.run import rundir
from ftmon.trainer.recipe.chat import session


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))


def trained(name: str) -> str:
    """Make a run of the trainer that has a final model; return its identifier."""
    run = rundir.create(name, ["train"], "train")
    run.config.write_text("")
    (run.path / "output" / "model").mkdir(parents=True)
    (run.path / "output" / "model" / "config.json").write_text("{}")
    return run.id


def test_the_run_that_was_taken_is_named() -> None:
    identifier = trained("demo")
    found = session.find("dem")
    assert found.text == f"{identifier}: {found.path}"


def test_a_name_that_several_runs_have_is_refused_with_their_identifiers() -> None:
    both = [trained("demo"), trained("demo")]
    with pytest.raises(SeveralRunsError) as raised:
        session.find("demo")
    assert all(identifier in str(raised.value) for identifier in both)
    with pytest.raises(UsageError, match="no such run, folder or model; 'ftmon ls' lists runs"):
        session.find("other")
