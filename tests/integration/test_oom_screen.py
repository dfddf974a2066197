"""The out-of-memory screen in the real app: opened by itself, the console, letting go, the captured snapshot."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eventually import SECONDS
from ftmon.protocol.messages import control
from ftmon.protocol.messages.control import Accepted
from ftmon.tui.app import FtmonApp
from ftmon.tui.screens.lists import AlertsScreen
from ftmon.tui.screens.oom import CapturedScreen, OomScreen, ReleaseDialog, file_of, place_words
from ftmon.tui.screens.overview import OverviewScreen
from ftmon.tui.screens.snapshot import SnapshotHelp
from ftmon.tui.widgets import state
from ftmon.tui.widgets.base import Canvas
from oomscenes import NAME, HeldRun, oom_of, out_of_memory
from scenes import ReadyReplay, until


def text_of(app: FtmonApp) -> str:
    return "\n".join(canvas.plain for canvas in app.screen.query(Canvas) if canvas.display)


async def shown(pilot: Any, condition: Callable[[], Any], what: str) -> Any:
    def ticked() -> Any:
        pilot.app.pump()
        return condition()

    return await until(pilot, ticked, what)


async def held(pilot: Any) -> OomScreen:
    await shown(pilot, lambda: isinstance(pilot.app.screen, OomScreen), "the screen of a held rank")
    return pilot.app.screen


@asynccontextmanager
async def opened(source: HeldRun, size: tuple[int, int] = (80, 24), **options: bool) -> AsyncIterator[tuple[Any, Any]]:
    app = FtmonApp(source, **options)
    async with app.run_test(size=size) as pilot:
        await held(pilot)
        yield app, pilot


async def test_it_opens_by_itself_once_and_says_what_becomes_of_the_others(tmp_path: Path) -> None:
    async with opened(HeldRun(tmp_path), (80, 40)) as (app, pilot):
        await shown(pilot, lambda: "logits and loss" in text_of(app), "the verdict")
        for words in ("held", "ranks 0, 2 and 3 wait for it", "what to try, in this order", "r: release it"):
            await shown(pilot, lambda words=words: words in text_of(app), words)
        await pilot.press("escape")
        await shown(pilot, lambda: isinstance(app.screen, OverviewScreen), "the overview")
        app.pump()
        assert isinstance(app.screen, OverviewScreen)
        await pilot.press("o")
        await held(pilot)


async def test_enter_on_its_alert_opens_it(tmp_path: Path) -> None:
    app = FtmonApp(ReadyReplay(out_of_memory(tmp_path), at_end=True))
    async with app.run_test(size=(100, 40)) as pilot:
        await shown(pilot, lambda: len(app.app_state.model.ooms), "the replay's state")
        assert isinstance(app.screen, OverviewScreen)
        await pilot.press("a")
        await shown(pilot, lambda: isinstance(app.screen, AlertsScreen), "the alerts")
        await pilot.press("enter")
        await held(pilot)
        await pilot.press("c")
        await shown(pilot, lambda: "this is a recording" in text_of(app), "why there is no console")


async def test_code_goes_to_the_held_rank_and_its_output_comes_back_harmless(tmp_path: Path) -> None:
    source = HeldRun(tmp_path)
    async with opened(source) as (app, pilot):
        await pilot.press("c")
        await shown(pilot, lambda: app.screen.focused is not None, "the console's line")
        await pilot.press(*"x.shapf", "backspace", "e", "enter")
        await shown(pilot, lambda: source.commands, "the command")
        (record,) = source.commands.values()
        assert record.verb == control.Console("x.shape", 1)
        source.answer(record.id, "torch.Size([4, 4736])\n\x1b[2J\x1b]0;owned\x07", "", place="model.py:143 forward")
        await shown(pilot, lambda: "torch.Size([4, 4736])" in text_of(app), "the output")
        assert "in model.py:143 forward" in text_of(app)
        assert "\x1b" not in text_of(app)
        assert "owned" not in text_of(app)
        # A block is continued until an empty line, and the history brings it back.
        await pilot.press(*"for i in y:", "enter", "tab", *"i", "enter", "enter")
        await shown(pilot, lambda: len(source.commands) == 2, "the second command")
        assert source.commands["1"].verb == control.Console("for i in y:\n    i", 1)
        source.commands["1"].accepted = Accepted("1", False, "what was asked before is still running")
        await shown(pilot, lambda: "refused: what was asked before" in text_of(app), "the refusal")
        await pilot.press("up", "up", "home", "delete", "enter")
        await shown(pilot, lambda: len(source.commands) == 3, "the third command")
        assert source.commands["2"].verb == control.Console(".shape", 1)
        await pilot.press("escape")
        await shown(pilot, lambda: "what to try" in text_of(app), "the report")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"console": False}, "without --allow-console"),
        ({"can_command": False}, "no hub that takes commands"),
        ({"read_only": True}, "attached read-only"),
    ],
)
async def test_a_console_is_refused_with_the_reason(tmp_path: Path, options: dict[str, bool], words: str) -> None:
    read_only = options.pop("read_only", False)
    source = HeldRun(tmp_path, **options)
    async with opened(source, (100, 30), read_only=read_only) as (app, pilot):
        await pilot.press("c")
        await shown(pilot, lambda: words in text_of(app), "the reason")
        await pilot.press(*"1+1", "enter")
        assert not source.commands


async def test_its_snapshot_opens_in_the_explorer_and_letting_go_asks_first_with_no_as_default(tmp_path: Path) -> None:
    source = HeldRun(tmp_path)
    async with opened(source) as (app, pilot):
        await pilot.press("4")
        await shown(pilot, lambda: isinstance(app.screen, CapturedScreen), "the explorer")
        await shown(pilot, lambda: "rank-1-step-45-oom.pickle" in text_of(app), "the timeline")
        assert app.screen.explorer.view == "segments"
        await pilot.press("1")
        await shown(pilot, lambda: "ForCausalLMLoss" in text_of(app), "the stacks")
        await pilot.press("question_mark")
        await shown(pilot, lambda: isinstance(app.screen, SnapshotHelp) and "figures" in text_of(app), "help")
        await pilot.press("escape")
        await shown(pilot, lambda: isinstance(app.screen, CapturedScreen), "the explorer again")
        await pilot.press("escape")
        await held(pilot)
        await pilot.press("r")
        await shown(pilot, lambda: isinstance(app.screen, ReleaseDialog), "the dialog")
        await shown(pilot, lambda: "raised in the failing frame" in text_of(app), "what follows")
        assert "launcher ends every rank of its node" in text_of(app).replace("\n", " ")
        await pilot.press("enter")
        await held(pilot)
        assert not source.commands
        await pilot.press("r")
        await shown(pilot, lambda: isinstance(app.screen, ReleaseDialog), "the dialog again")
        await pilot.press("right", "enter")
        await shown(pilot, lambda: source.commands, "the command")
        assert source.commands["0"].verb == control.Release([1])


def test_a_snapshot_elsewhere_is_said_to_be_there_and_nothing_outside_of_the_run_is_opened(tmp_path: Path) -> None:
    source = HeldRun(tmp_path / "run")
    source.pump()
    oom = oom_of()
    assert file_of(oom, tmp_path / "run") == tmp_path / "run" / NAME
    assert f"{tmp_path / 'run'}/{NAME}" in place_words(oom, tmp_path / "run", source.model)
    assert "on node-1" in place_words(oom, None, source.model)
    (tmp_path / "secret").write_text("x")
    for name in ("../secret", str(tmp_path / "secret"), "snapshots/none"):
        assert file_of(msgspec.structs.replace(oom_of(), snapshot=name), tmp_path / "run") is None


CONFIG = """
model: {config: {model_type: llama, vocab_size: 512, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2,
        num_attention_heads: 4, num_key_value_heads: 4}, activation_offload: OFFLOADED}
data: {path: rows.jsonl}
"""


async def test_dry_runs_of_the_job_are_cancelled_with_the_same_key_and_what_refuses_them_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "MESSAGE_SECONDS", SECONDS)
    source = HeldRun(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "config.yaml").write_text(CONFIG.replace("OFFLOADED", "none"))
    source.model.info.kind, source.model.info.command = "run", ["deepspeed", "train.py"]
    async with opened(source, (100, 40)) as (app, pilot):
        await pilot.press("w")
        await shown(
            pilot, lambda: "ftmon predict --what-if -- deepspeed train.py" in app.app_state.message[0], "the hint"
        )
        assert not app.app_state.dry_runs

        source.model.info.kind = "train"
        await pilot.press("w")
        (runs,) = (await shown(pilot, lambda: app.app_state.dry_runs, "the dry runs")).values()
        await shown(pilot, lambda: "w: cancel" in text_of(app), "the progress")
        assert "verified by dry runs of this job" in text_of(app)
        assert runs._process.poll() is None
        await pilot.press("w")
        await shown(pilot, lambda: "cancelled" in text_of(app), "the end of it")
        assert runs._process.returncode == -9

        (tmp_path / "config.yaml").write_text(CONFIG.replace("OFFLOADED", "all"))
        await pilot.press("w")
        # Its process imports the libraries before it refuses, at a low priority: on busy cores for minutes.
        refusal = "model.activation_offload cannot be predicted"
        await until(pilot, lambda: app.pump() or refusal in text_of(app), "a refusal", 250)
        app.app_state.end_dry_runs()
