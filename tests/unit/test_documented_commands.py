"""The commands in README.md, docs/symptoms.md and docs/learn.md are ones that the command line accepts."""

import re
import shlex

import pytest
from ftmon.tui.cli.main import parse
from places import ROOT

SYMPTOMS = ("Out of memory", "NaN", "Hang", "Slow", "Loss does not fall", "Disk full")


def commands(text: str) -> list[list[str]]:
    """Return the words of each ``ftmon`` command in code: whole lines of blocks, and quoted ones."""
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S) for line in block.splitlines()]
    lines += re.findall(r"`(ftmon [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ftmon")]


def status_of(words: list[str]) -> object:
    """Return 0 if the command line accepts the words, else the exit status of the refusal."""
    try:
        parse([word for word in words if word != "..."])
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize(("document", "least"), [("README.md", 11), ("docs/symptoms.md", 11), ("docs/learn.md", 7)])
def test_every_command_is_accepted(document: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands((ROOT / document).read_text())
    assert len(found) >= least
    for words in found:
        if len(words) == 1:  # the name of a command in a sentence
            words = [*words, "--help"]
        assert status_of(words) == 0, f"ftmon {shlex.join(words)}: {capsys.readouterr().err}"


def test_the_readme_s_first_screen_leads_to_symptoms_that_have_three_steps_with_a_command_first():
    assert "docs/symptoms.md" in "".join((ROOT / "README.md").read_text().splitlines()[:20])
    _, *sections = re.split(r"^## (.+)$", (ROOT / "docs/symptoms.md").read_text(), flags=re.M)
    assert tuple(sections[::2]) == SYMPTOMS
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        steps = re.findall(r"^(\d)\. (.+)", text, re.M)
        assert [number for number, _ in steps] == ["1", "2", "3"], name
        assert "ftmon " in text
        assert all(step.startswith(("`ftmon ", "If ")) for _, step in steps), name
