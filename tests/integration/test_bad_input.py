"""Mistakes that only show once the training has started: one clear line, and an exit status that says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from ftmon.protocol.recording.reader import Reader
from ftmon_process import Ftmon, ftmon_home, wait_until_nothing_is_left

DATA = '{"prompt": "name a colour", "response": "blue"}\n' * 8


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ftmon]:
    with ftmon_home(tmp_path_factory.mktemp("home")) as ftmon:
        yield ftmon


def test_a_model_type_that_is_not_one_is_told_on_the_terminal_as_wrong_usage(home: Ftmon, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(DATA)
    words = ["model.config={model_type: lama, hidden_size: 32}", f"data.path={tmp_path / 'data.jsonl'}", "run.ranks=1"]
    ended = home.run("train", *words, "--plain", seconds=480)
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "model.config.model_type: Unrecognized model identifier: lama; did you mean llama?" in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr
    why = next(line for line in ended.stdout.splitlines() if line.startswith("why:"))
    assert "Unrecognized model identifier: lama" in why
    wait_until_nothing_is_left(home.newest())  # the hub has recorded the end
    with Reader(home.newest().recording) as reader:
        (failure,) = [alert for alert in reader.alerts() if alert.kind == "failure"]
        assert not [alert for alert in reader.alerts() if alert.kind == "exit"], "it is said once"
    assert failure.evidence["error"] in why
