"""Shell completion: the scripts are made from the parser and know this user's runs."""

import pytest
from ftmon.tui.cli.arguments import SHELLS
from ftmon.tui.cli.main import main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_learns_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(command in text for command in ("demo", "attach", "replay", "completion", "print-config"))
