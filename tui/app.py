"""The app: a timer applies new messages and repaints changes on the visible screens."""

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from textual.screen import Screen

from ..protocol.errors import FtmonError
from ..protocol.run.notices import terminal_sequence
from ..protocol.run.rundir import RunDir
from .model.run import TerminalNotices
from .screens.base import HelpScreen, MonitorScreen, ThemedApp
from .screens.dialogs import GotoDialog, KillDialog, StopDialog, refusal
from .screens.overview import OverviewScreen, RankScreen
from .source.base import Source, Transport
from .widgets.state import AppState

FPS = 4
FIRST_POLLS = 100  # polls per second until the first ranks have reported, so that they are painted at once
FIRST_SECONDS = 3.0  # time limit of that polling in seconds


def _opening(module: str, screen: str) -> "Callable[[FtmonApp], None]":
    def action(app: "FtmonApp") -> None:
        app.show(getattr(import_module(f".screens.{module}", __package__), screen)(app.app_state))

    return action


class FtmonApp(ThemedApp):
    """The terminal app on one run, or on the list of runs.

    ``None`` as source opens the list of runs. ``play`` plays a recording at once. ``notices`` finds events for
    notifications in the terminal. The app closes once ``ends`` returns True.
    """

    TITLE = "ftmon"

    def __init__(
        self,
        source: Source | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        read_only: bool = False,
        light: bool = False,
        play: bool = False,
        notices: TerminalNotices | None = None,
        ends: "Callable[[], bool]" = lambda: False,
    ) -> None:
        super().__init__(source, ascii=ascii, light=light, read_only=read_only)
        self._play = play
        self._notices = notices
        self._ends = ends

    def get_default_screen(self) -> Screen[Any]:
        if self.app_state.source is not None:
            return OverviewScreen(self.app_state)
        from .screens.runs import RunsScreen

        return RunsScreen(self.app_state)

    def on_mount(self) -> None:
        if self.app_state.source is not None:
            self.app_state.source.start()
            transport = self.app_state.source.transport
            if self._play and transport.mode == "replay" and not transport.at_end:
                transport.play()
        self.set_interval(1 / FPS, self.pump)
        self._hurry_until = time.monotonic() + FIRST_SECONDS
        self._hurry = self.set_interval(1 / FIRST_POLLS, self._until_first)

    def _until_first(self) -> None:
        source = self.app_state.source
        if source is not None and source.pump():
            self.pump()
        if source is None or source.model.ranks or time.monotonic() > self._hurry_until:
            self._hurry.pause()

    def pump(self) -> None:
        """Apply new messages and paint; no effect once the app closes, which removes widgets before timers."""
        if not self.is_running:
            return
        if self._ends():
            self.exit()
            return
        source = self.app_state.source
        if source is not None:
            source.pump()
            if source.transport.message:
                self.app_state.show_message(source.transport.message, "warning")
                source.transport.message = ""
        for screen in reversed(self.screen_stack):  # screens below a dialog are visible too
            self._tick(screen)
            if not screen.is_modal:
                break
        self._show_held()
        if self._notices is not None and self._driver is not None:
            for notice in self._notices.fresh(self.app_state.model):
                self._driver.write(terminal_sequence(notice))

    def _tick(self, screen: Screen[Any]) -> None:
        tick: Callable[[], None] | None = getattr(screen, "tick", None)
        if tick is not None and screen.is_mounted:
            try:
                tick()
            except (ArithmeticError, ValueError) as error:  # an impossible figure; later ones may be valid
                self.app_state.show_message(f"cannot be drawn: {type(error).__name__}: {error}", "warning")

    def _show_held(self) -> None:
        """Open the out-of-memory screen once when a rank is held at such an error; never over a dialog."""
        source = self.app_state.source
        if source is None or self.app_state.replaying or not isinstance(self.screen, MonitorScreen):
            return
        fresh = self.app_state.held.fresh(self.app_state.model)
        if fresh is not None:
            self.action_oom(fresh.oom.rank)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return False for actions without a meaning on the visible screen, which hides their keys."""
        if action == "jobs" and not self.app_state.model.has_jobs:
            return False
        return not (isinstance(self.screen, MonitorScreen) and action in self.screen.HIDDEN) if self._running else True

    def interrupt_words(self) -> str:
        """Return the answer to ctrl+c, with the key that ends the run if this app can end it."""
        source = self.app_state.source
        if source is None or self.app_state.model.ended or source.transport.mode == "replay":
            return super().interrupt_words()
        return "q leaves, training continues" + ("" if refusal(self.app_state, "kill") else "; k ends it")

    def repaint(self) -> None:
        self.pump()

    # Keys of every screen.

    def action_transport(self, what: str, *args: float) -> None:
        """Play, pause or seek: a method of the transport."""
        source = self.app_state.source
        if source is None:
            self.app_state.show_message("no run is open", "warning")
            return
        getattr(source.transport, what)(*args)
        self.pump()

    def action_finer(self) -> None:
        self.app_state.finer()
        self.pump()

    def action_coarser(self) -> None:
        self.app_state.coarser()
        self.pump()

    # Other screens.

    def show(self, screen: Screen[Any]) -> None:
        """Open a screen on the overview, in place of any other."""
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.push_screen(screen)

    async def action_back(self) -> None:
        if len(self.screen_stack) > 1:
            await self.pop_screen()

    def action_open(self) -> None:
        if self.app_state.model.ranks:
            self.show(RankScreen(self.app_state))

    def action_alerts(self) -> None:
        """Open the alerts; in a replay that is before all of them, move to the first error."""
        from .screens.lists import AlertsScreen

        transport = self._replay_transport()
        first = transport.first_alert() if transport is not None else None
        if transport is not None and first is not None and not len(self.app_state.model.alerts):
            transport.to_alert(first.alert_id)
            self.app_state.show_message(f"moved to the first {first.severity}: {first.title}")
        self.show(AlertsScreen(self.app_state))

    action_logs = _opening("lists", "LogsScreen")
    action_stacks = _opening("lists", "StacksScreen")
    action_events = _opening("memory", "EventsScreen")
    action_training = _opening("training", "TrainingScreen")

    def action_memory(self, phase: str = "") -> None:
        from .screens.memory import MemoryScreen

        self.show(MemoryScreen(self.app_state, phase))

    def action_jobs(self) -> None:
        from .screens.runs import JobsScreen

        if self.app_state.model.has_jobs:
            self.show(JobsScreen(self.app_state))

    def action_oom(self, rank: int | None = None) -> None:
        """Open the out-of-memory errors: that rank's latest, or the most relevant one.

        A replay that is before the first of them moves there.
        """
        from .screens.oom import OomScreen

        app_state = self.app_state
        if app_state.model.ooms:
            self.show(OomScreen(app_state, rank))
            return
        transport = self._replay_transport()
        first = transport.first_alert("oom") if transport is not None else None
        if transport is not None and first is not None:
            transport.to_alert(first.alert_id)
            app_state.show_message(f"moved to the first out-of-memory error: {first.title}")
            self.show(OomScreen(app_state, rank))
            return
        where = "in this recording" if transport is not None else "in this run so far"
        app_state.show_message(f"no out-of-memory error {where}", "warning")
        self.pump()

    def _replay_transport(self) -> Transport | None:
        source = self.app_state.source
        return source.transport if source is not None and source.transport.mode == "replay" else None

    def action_help(self) -> None:
        from .screens.snapshot import SnapshotHelp, SnapshotScreen

        if isinstance(self.screen, MonitorScreen):
            kind = SnapshotHelp if isinstance(self.screen, SnapshotScreen) else HelpScreen
            self.push_screen(kind(self.app_state, self.screen))

    def action_goto(self) -> None:
        if self.app_state.source is not None:
            self.push_screen(GotoDialog(self.app_state))

    def action_kill(self) -> None:
        if self._may_act("kill"):
            screen = self.screen
            marked = screen.in_question() if isinstance(screen, MonitorScreen) else {self.app_state.selected}
            self.push_screen(KillDialog(self.app_state, marked))

    def action_stop(self) -> None:
        if self._may_act("stop"):
            self.push_screen(StopDialog(self.app_state))

    def action_runs(self) -> None:
        from .screens.runs import RunsScreen

        if not isinstance(self.screen, RunsScreen):
            self.show(RunsScreen(self.app_state))

    def on_runs_screen_opened(self, event: Any) -> None:
        self.open_run(event.run)

    def open_run(self, run: RunDir) -> None:
        """Show another run, live or its recording, and close the present one."""
        from .source.live import LiveSource

        try:
            source = LiveSource(run)
        except FtmonError as error:
            self.app_state.show_message(str(error), "error")
            return
        self.app_state.end_dry_runs()
        if self.app_state.source is not None:
            self.app_state.source.close()
        self._notices = TerminalNotices(run)
        fresh = AppState(source, self.app_state.theme, self.app_state.read_only)
        self.app_state = fresh
        source.start()
        for screen in self.screen_stack[1:]:
            del screen
            self.pop_screen()
        first = self.screen
        if not first._result_callbacks:
            # Textual gives the default screen no result callback, and switch_screen removes one.
            first._push_result_callback(first, None)
        self.switch_screen(OverviewScreen(fresh))
        self._hurry_until = time.monotonic() + FIRST_SECONDS
        self._hurry.resume()

    def _may_act(self, verb: str) -> bool:
        why = refusal(self.app_state, verb)
        if why:
            self.app_state.show_message(why, "warning")
            self.pump()
        return not why


def run_app(
    source: Source,
    *,
    ascii_only: bool = False,
    read_only: bool = False,
    notices: TerminalNotices | None = None,
    ends: "Callable[[], bool]" = lambda: False,
) -> int:
    """Show a run until the user leaves, or ``ends``; then the source is closed, and its model stays readable.

    Returns 0, or 1 if an error ended the app.
    """
    return _run(FtmonApp(source, ascii=ascii_only, read_only=read_only, play=True, notices=notices, ends=ends))


def run_picker(*, ascii_only: bool = False) -> int:
    """Show the list of runs, and the runs opened from it, until the user leaves; return as ``run_app``."""
    return _run(FtmonApp(ascii=ascii_only))


def _run(app: FtmonApp) -> int:
    try:
        app.run()
    finally:
        app.app_state.end_dry_runs()
        if app.app_state.source is not None:  # the source of the last opened run; the others are closed
            app.app_state.source.close()
    return app.return_code or 0
