"""The out-of-memory screen: report, snapshot of that moment, console in the failing frame, dry runs, release."""

import contextlib
import time
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget

from ...protocol.checks import TRAINING_PACKAGES
from ...protocol.errors import FtmonError
from ...protocol.messages.control import Console, Release
from ...protocol.messages.telemetry import Oom
from ...protocol.run.rundir import RunDir
from ...protocol.text import sanitize
from ..model.oom import CaseKey, ConsoleSession, OomCase
from ..model.peaks import capacity_of, length_of
from ..model.run import RunModel, first_to_show, held_cases, held_since
from ..model.snapshot import Explorer
from ..source.dry_runs import DryRuns
from ..source.load import open_replays
from ..widgets.drawing import Line, wrap
from ..widgets.oom import VIEWS, ConsoleInput, ConsoleOutput, OomHead, OomReportView
from ..widgets.state import AppState
from .base import LINE_KEYS, MonitorScreen, key
from .dialogs import CommandDialog, answer_lines, button_line, refusal
from .snapshot import SnapshotScreen


class CapturedScreen(SnapshotScreen, inherit_bindings=False):
    """The explorer on a run's own snapshot; escape returns to the previous screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        key("escape", "app.back", "back", "back to the report"),
        *SnapshotScreen.BINDINGS,
    ]

    def __init__(self, app_state: AppState, explorer: Explorer, view: str) -> None:
        super().__init__(app_state, explorer)
        if not explorer.before:
            explorer.show(view)


def file_of(oom: Oom, folder: Path | None) -> Path | None:
    """Return the snapshot of an error; None if there is none, or it is not on this host.

    The name is from a rank, so only files in the run's directory are opened.
    """
    if folder is None or not oom.snapshot:
        return None
    home = folder.resolve()
    path = (home / oom.snapshot).resolve()
    return path if path.is_relative_to(home) and path.is_file() else None


def place_words(oom: Oom, folder: Path | None, model: RunModel) -> str:
    """Return the place of the snapshot, or the reason why there is none."""
    if not oom.snapshot:
        return "none was captured" + ("" if oom.measure == "cuda" else ": the CPU's allocator keeps no trace")
    name = sanitize(oom.snapshot, 300)
    if file_of(oom, folder) is not None:
        return f"{folder}/{name}: 2 opens its timeline and live stacks, 4 the segment map"
    rank = model.ranks.get(oom.rank)
    host = f" on {sanitize(rank.hello.host, 100)}" if rank is not None and rank.hello is not None else ""
    run = f"{model.info.id}/" if model.info.id else ""
    if folder is not None:
        return f"{name} is not in {folder} any more, or is{host or ' on another host'}: ftmon snapshot FILE opens it"
    return f"{run}{name} in the directory of runs{host}: copy it here, then: ftmon snapshot {Path(name).name}"


class ReleaseDialog(CommandDialog):
    """Asks whether to release the visible rank or all held ranks; then shows the outcome."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a,space", "all", "all", tooltip="this rank, or all that are held"),
        Binding("y", "yes", "yes", tooltip="release"),
        Binding("q", "leave", "leave", tooltip="close"),
    ]
    WIDTH = 74
    all_of_them = False

    def __init__(self, app_state: AppState, case: OomCase) -> None:
        super().__init__(app_state)
        self.case = case

    @property
    def ranks(self) -> list[int]:
        if not self.all_of_them:
            return [self.case.oom.rank]
        return sorted({case.oom.rank for case in held_cases(self.app_state.model)} | {self.case.oom.rank})

    def command(self) -> Release:
        return Release(self.ranks)

    def lines(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        ranks = self.ranks
        words = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        lines = [Line(f"Release {words}", theme.style("text", bold=True)), Line()]
        if self.record is not None:
            lines += answer_lines(self.record, model, width, theme)
            return [*lines, Line(), Line("escape: close", theme.style("dim"))]
        lines += [Line(row, theme.base) for text in self._what_follows() for row in wrap(text, width)]
        held = len({case.oom.rank for case in held_cases(model)})
        if held > 1:
            mark = theme.glyphs.marked if self.all_of_them else theme.glyphs.unmarked
            lines += [Line(), Line(f"{mark} ", theme.style("accent")).add(f"all {held} held ranks (a)", theme.base)]
        return [*lines, Line(), button_line(f"Yes, release {words}", self.yes, theme)]

    def _what_follows(self) -> list[str]:
        model = self.app_state.model
        texts = [
            "The error is raised in the failing frame, as it would have been without ftmon. A script that catches it "
            "continues; otherwise the rank ends. Its console is closed."
        ]
        if model.info.framework == "deepspeed" or model.info.kind in ("demo", "train"):
            texts.append("When a rank ends, DeepSpeed's launcher ends every rank of its node, and the run ends.")
        elif model.world_size > 1:
            texts.append("When a rank ends, the others wait in their next collective until its timeout, or are ended.")
        return texts

    def action_all(self) -> None:
        if not self.sent:
            self.all_of_them = not self.all_of_them
            self.paint()


_MOST_BYTES = 1 << 20
_OWN = ("train", "demo")


def begin(app_state: AppState, case: OomCase) -> DryRuns | str:
    """Start the dry runs of an error's job, as it was then; or return in one line why they cannot start."""
    model, oom = app_state.model, case.oom
    folder = app_state.source.folder if app_state.source is not None else None
    if model.info.kind and model.info.kind not in _OWN:
        command = " ".join(model.info.command) or "COMMAND"
        return (
            "the model and configuration of a script other than ftmon's trainer are unknown here: "
            f"ftmon predict --what-if -- {sanitize(command, 200)}, or --model and --deepspeed"
        )
    rank = model.ranks.get(oom.rank)
    if oom.measure != "cuda" or rank is None or rank.hello is None or rank.hello.device.kind == "cpu":
        return "the ranks train on the CPU: a dry run predicts a GPU's memory"
    config = _config(folder) or (model.prediction.config if model.prediction is not None else "")
    if not config:
        return "the run's configuration is not at hand: ftmon predict CONFIG.yaml --what-if, where it is"
    missing = [name for name in TRAINING_PACKAGES if find_spec(name) is None]
    if missing:
        return f"a dry run needs {', '.join(missing)}, not installed here: pip install 'ftmon[train]'"
    words = [f"--gpu={rank.hello.device.name}", f"--capacity={max(1, capacity_of(oom))}"]
    if length := length_of(oom):
        words.append(f"--sequence-length={length}")
    settings = "expandable_segments:True" if oom.expandable else ""
    environment = {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": ""}
    try:
        return DryRuns(config, words, environment, _cwd(folder))
    except OSError as error:
        return f"the dry runs cannot be started: {error.strerror}"


def _config(folder: Path | None) -> str:
    if folder is None:
        return ""
    with contextlib.suppress(OSError, UnicodeDecodeError), RunDir(folder).config.open("rb") as file:
        return file.read(_MOST_BYTES).decode()
    return ""


def _cwd(folder: Path | None) -> Path | None:
    if folder is None:
        return None
    try:
        cwd = Path(RunDir(folder).read_run().cwd)
    except FtmonError:
        return None
    return cwd if cwd.is_dir() else None


class OomScreen(MonitorScreen):
    """One out-of-memory error; ``rank``: show the latest of that rank."""

    NAME = "out of memory"
    WHAT = (
        "A failed allocation: its cause, judged from the figures at that moment; what to try, in order, with the bytes "
        "it would free; the figures, the batch compared with the largest so far, the state of all ranks, and where it "
        "failed. 2 to 4 open the memory snapshot captured then. In a run started with --on-oom hold, the rank waits in "
        "the failing frame: r releases it, k kills it; with --allow-console, c opens a console in that frame. w "
        "predicts which changes fit, for runs of ftmon's trainer."
    )
    TITLE_LINES = 1
    LEGEND = ("states",)
    BINDINGS: ClassVar[list[BindingType]] = [
        key("escape", "leave", "back", "back; from the console to the report"),
        *LINE_KEYS,
        key("c,5", "console", "console", "run code in the failing frame of a held rank", bar="c"),
        key("r", "release", "release", "release a held rank; asks first"),
        key(
            "w", "what_if", "what if", "predict which changes fit, each by a dry run of this job; press again to cancel"
        ),
        key("2", "explore('stacks')", "stacks", "the timeline of that moment's snapshot, and what was live", bar="2"),
        key("3", "explore('blocks')", "blocks", "the largest blocks of it", show=False),
        key("4", "explore('segments')", "segments", "the map of its segments and blocks", bar="4"),
        key("1", "report", "report", "the report", show=False),
        key("left", "case(-1)", "previous", "the error before", show=False),
        key("right", "case(1)", "next", "the next error", show=False),
        key("s", "app.stacks", "threads", "Python stacks of the rank's threads, as of now", show=False),
        key("enter", "type", "type", "type into the console", show=False),
    ]

    def __init__(self, app_state: AppState, rank: int | None = None) -> None:
        super().__init__(app_state)
        found = first_to_show(app_state.model, rank)
        self.case_key: CaseKey | None = found.key if found is not None else None
        # Attributes, not queries: the app also ticks a screen that is being removed.
        self._head = OomHead(app_state, name="oom-head")
        self._report = OomReportView(app_state, name="oom-report")
        self._output = ConsoleOutput(app_state, name="console-output")
        self._field = ConsoleInput(app_state, "console-input")
        self._explorers: dict[Path, Explorer] = {}
        self._reading: Path | None = None

    @property
    def case(self) -> OomCase | None:
        return self.app_state.model.ooms.get(self.case_key)

    def body(self) -> Iterable[Widget]:
        return self._head, self._report, self._output, self._field

    def tick(self) -> None:
        model, source = self.app_state.model, self.app_state.source
        if self.case is None:
            # A replay is before it, or the first one has just arrived.
            found = first_to_show(model)
            self.case_key = found.key if found is not None else self.case_key
        case = self.case
        if case is not None:
            self.app_state.select(case.oom.rank)
            self._report.place = place_words(case.oom, source.folder if source else None, model)
            self._report.acts = self.app_state.can_act
            if (runs := self.app_state.dry_runs.get(case.key)) is not None:
                runs.poll()
            session = self._session(case.oom.rank)
            if source is not None:
                session.receive(source.commands)
            self._output.session = self._field.session = session
            self._output.refusal = self._why_no_console(case)
            self.set_class(bool(self._output.refusal), "no-console")
            if self._output.refusal and self._field.has_focus:
                self.set_focus(None)
        for canvas in (self._head, self._report, self._output):
            canvas.case_key = self.case_key
        self._head.view = "console" if self.has_class("console") else VIEWS[0]
        super().tick()

    def in_question(self) -> set[int]:
        case = self.case
        return {case.oom.rank} if case is not None else super().in_question()

    def _session(self, rank: int) -> ConsoleSession:
        return self.app_state.consoles.setdefault(rank, ConsoleSession(rank))

    def _why_no_console(self, case: OomCase) -> str:
        app_state, oom = self.app_state, case.oom
        if app_state.source is None or app_state.source.transport.mode == "replay":
            return "no console: this is a recording, its processes are gone"
        if not oom.held:
            return "no console: this rank was not held; start the run with --on-oom hold --allow-console"
        if not oom.console:
            return (
                "no console: this run was started without --allow-console, so no code may be run in its ranks; "
                "ftmon run --on-oom hold --allow-console ... allows it"
            )
        if not held_since(app_state.model, case):
            return f"no console: rank {oom.rank} waits no longer"
        if app_state.read_only:
            return "no console: this terminal is attached read-only"
        if not app_state.source.can_command:
            return "no console: the run has no hub that takes commands"
        return ""

    # Views.

    def action_leave(self) -> None:
        """Go back from the console to the report, or from the report to the previous screen."""
        if self.has_class("console"):
            self.action_report()
        else:
            self.app.call_later(self.run_action, "app.back")

    def action_report(self) -> None:
        self.remove_class("console")
        self.set_focus(None)
        self.call_after_refresh(self.tick)

    def action_console(self) -> None:
        self.add_class("console")
        self.tick()
        self.call_after_refresh(self._begin_to_type)

    def _begin_to_type(self) -> None:
        if self.case is not None and not self._output.refusal:
            self._field.focus()
        self.tick()

    def action_type(self) -> None:
        if self.has_class("console"):
            self._begin_to_type()

    def on_console_input_entered(self, event: ConsoleInput.Entered) -> None:
        case, source = self.case, self.app_state.source
        if case is None or source is None:
            return
        session = self._session(case.oom.rank)
        if why := self._why_no_console(case):
            session.note(why, "error")
        else:
            number = source.send(Console(event.code, case.oom.rank))
            session.sent(number, event.code, time.time())
        self._output.back = 0
        self.tick()

    def on_console_input_left(self) -> None:
        self.action_report()

    def on_console_input_scrolled(self, event: ConsoleInput.Scrolled) -> None:
        self.action_page(event.direction)

    def action_move(self, lines: int) -> None:
        shown = self._output if self.has_class("console") else self._report
        shown.scroll(lines)

    def action_page(self, direction: int) -> None:
        shown = self._output if self.has_class("console") else self._report
        self.action_move(direction * max(1, shown.size.height - 2))

    def action_case(self, delta: int) -> None:
        keys = [case.key for case in self.app_state.model.ooms.ordered()]
        if self.case_key in keys:
            self.case_key = keys[max(0, min(keys.index(self.case_key) + delta, len(keys) - 1))]
            self._report.top = 0
            self.tick()

    # Commands.

    def action_release(self) -> None:
        case, app_state = self.case, self.app_state
        if case is None or not held_since(app_state.model, case):
            app_state.show_message("no rank waits at this error", "warning")
        elif why := refusal(app_state, "release"):
            app_state.show_message(why, "warning")
        else:
            self.app.push_screen(ReleaseDialog(app_state, case))
        self.tick()

    def action_what_if(self) -> None:
        case, app_state = self.case, self.app_state
        if case is None:
            return
        runs = app_state.dry_runs.get(case.key)
        if runs is not None and runs.running:
            runs.cancel()
        elif runs is not None and runs.found.state == "done":
            app_state.show_message("the changes are predicted already")
        else:
            begun = begin(app_state, case)
            if isinstance(begun, str):
                app_state.show_message(sanitize(begun, 400), "warning")
            else:
                app_state.dry_runs[case.key] = begun
                self.action_report()
        self.tick()

    # The snapshot.

    def action_explore(self, view: str) -> None:
        case, app_state = self.case, self.app_state
        if case is None:
            return
        folder = app_state.source.folder if app_state.source is not None else None
        path = file_of(case.oom, folder)
        if path is None:
            app_state.show_message(sanitize(place_words(case.oom, folder, app_state.model)), "warning")
            self.tick()
        elif path in self._explorers:
            self.app.push_screen(CapturedScreen(app_state, self._explorers[path], view))
        elif self._reading is None:
            self._reading = path
            app_state.show_message(f"reading {path.name} ...")
            self.tick()
            self.run_worker(lambda: self._read(path, view), thread=True, exit_on_error=False)

    def _read(self, path: Path, view: str) -> None:
        try:
            found: Explorer | str = Explorer(open_replays(path))  # a large one needs seconds
        except FtmonError as error:
            found = str(error)
        self.app.call_from_thread(self._opened, path, view, found)

    def _opened(self, path: Path, view: str, found: Explorer | str) -> None:
        self._reading = None
        if isinstance(found, str):
            self.app_state.show_message(sanitize(found), "error")
            self.tick()
            return
        self._explorers[path] = found
        self.app_state.show_message("")
        if self.is_current:
            self.app.push_screen(CapturedScreen(self.app_state, found, view))
