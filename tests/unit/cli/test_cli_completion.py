"""Shell completion: the scripts are made from the parser and know this user's runs."""

import os
import subprocess
from pathlib import Path

import pytest
from ftmon.tui.cli.main import main
from ftmon.tui.cli.parser import SHELLS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_learns_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(command in text for command in ("demo", "attach", "replay", "completion", "print-config"))


def test_bash_completes_commands_options_and_run_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ftmon.bash"
    file.write_text(script("bash", capsys))
    (tmp_path / "runs" / "demo-20250101-000000").mkdir(parents=True)

    def complete(*words: str) -> list[str]:
        code = (
            f". {file}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1};"
            ' _shtab_ftmon; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        environment = {**os.environ, "FTMON_HOME": str(tmp_path)}
        done = subprocess.run(
            ["bash", "-c", code], capture_output=True, text=True, env=environment, timeout=30, check=True
        )
        return done.stdout.split()

    assert complete("ftmon", "att") == ["attach"]
    assert complete("ftmon", "attach", "de") == ["demo-20250101-000000"]
    assert "--signal" in complete("ftmon", "kill", "--s")
