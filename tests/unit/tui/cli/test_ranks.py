"""What ``ftmon kill`` asks before it does anything."""

import io
from pathlib import Path

import pytest
from ftmon.protocol.run.rundir import RunDir
from ftmon.tui.cli import ranks
from ftmon.tui.cli.main import parse


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def ask(monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, *words: str) -> tuple[bool, str]:
    """Return the consent, and what was asked for it on a terminal."""
    shown = FakeTerminal()
    monkeypatch.setattr("sys.stderr", shown)
    monkeypatch.setattr("sys.stdin", stdin)
    return ranks._confirmed(RunDir(Path("/runs/demo-1")), parse(["kill", "demo", *words])), shown.getvalue()


@pytest.mark.parametrize(("answer", "consent"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False)])
def test_on_a_terminal_only_yes_is_consent(monkeypatch, answer, consent):
    given, question = ask(monkeypatch, FakeTerminal(answer))
    assert given is consent
    assert "INT, TERM and KILL in steps to all of demo-1" in question


def test_killing_ranks_says_what_follows_and_yes_and_scripts_are_not_asked(monkeypatch):
    _, question = ask(monkeypatch, FakeTerminal("n\n"), "--rank", "3", "--rank", "1", "--signal", "TERM")
    assert "TERM to ranks 1, 3 of demo-1" in question
    assert "DeepSpeed ends the whole node" in question
    assert ask(monkeypatch, FakeTerminal(""), "--yes") == (True, "")
    assert ask(monkeypatch, io.StringIO("")) == (True, "")
