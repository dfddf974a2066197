"""The app that explores memory snapshots: timeline, list of the view, search prompt, help."""

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen

from ...protocol.analysis.allocator.snapshot_replay import Replay
from ..model.snapshot import Explorer, freeze_garbage_collector
from ..widgets.base import KeyBar, Prompt
from ..widgets.drawing import Line
from ..widgets.snapshot import SnapshotList, SnapshotTimeline
from ..widgets.state import AppState
from .base import FILE_KEYS, HelpScreen, ListScreen, OneScreenApp, TooSmall, key

_FIGURES = (
    ("alloc", "blocks the program holds, rounding included"),
    ("active", "the same, and freed blocks that wait for a stream"),
    ("req", "sizes that the program requested, of active blocks"),
    ("rsvd", "segments obtained from the driver"),
)


class SnapshotHelp(HelpScreen):
    """Explains the explorer: its signs, figures and keys."""

    def content(self, width: int) -> list[Line]:
        """Return all lines; signs and figures come before the keys."""
        theme = self.theme
        lines = super().content(width)
        keys = next(index for index, line in enumerate(lines) if line.plain == "keys")
        signs = [Line("signs", theme.style("accent", bold=True))]
        for glyph, tone, words in (
            (theme.glyphs.eighths[8], "allocated", "allocated; the lighter tone behind it is reserved"),
            (theme.glyphs.peak, "peak", "the highest allocated figure of the window; below the graph: P"),
            ("fwd", "text", "bands under the graph: phases, recorded spans, user metadata"),
            (theme.glyphs.spike, "accent", "the cursor: everything below is as of then"),
            ("m", "warning", "the mark that 3 compares the cursor with"),
            (theme.glyphs.error, "error", "an allocation failed: out of memory"),
        ):
            signs.append(Line(f"  {glyph} ", theme.style(tone, bold=True)).add(words, theme.style("dim")))
        signs += [Line(), Line("figures", theme.style("accent", bold=True))]
        signs += [Line(f"  {name:<8}", theme.base).add(words, theme.style("dim")) for name, words in _FIGURES]
        return [*lines[:keys], *signs, Line(), *lines[keys:]]


class SnapshotScreen(ListScreen, inherit_bindings=False):
    """A snapshot at the cursor's moment."""

    NAME = "memory snapshot"
    inherits_keys = False
    WHAT = (
        "The curves are allocated and reserved memory after each entry of the allocator's trace. The list shows the "
        "state at the cursor: 1 live memory by allocating stack; 2 the largest blocks; 3 allocations and frees since "
        "the mark; 4 the segments and how full they are; 5 fragmentation and the out-of-memory error in words; 6, with "
        "two files, the difference between them."
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        key("left", "column(-1)", "cursor", "move the cursor one column back", bar="← →"),
        key("right", "column(1)", "cursor on", "move the cursor one column forward", show=False),
        key("up", "move(-1)", "up", "one row up", show=False),
        key("down", "move(1)", "down", "one row down", show=False),
        key("enter", "branch", "open", "open or close a branch of the tree"),
        key("p", "peak", "peak", "to the highest allocated figure"),
        key("o", "oom", "oom", "to the allocation that failed"),
        key("m", "mark", "mark", "mark this moment, for 3; on the mark: remove it"),
        key("slash", "filter", "search", "only stacks that contain a text"),
        key("f", "fold", "fold", "fold frames of libraries, or show them all"),
        key("plus,equals_sign", "zoom(1)", "zoom", "show less of the timeline, in more detail", bar="+ -"),
        key("minus", "zoom(-1)", "zoom out", "show more of the timeline", show=False),
        key("tab", "view(1)", "view", "the next view"),
        key("1", "show('stacks')", "stacks", "live stacks", show=False),
        key("2", "show('blocks')", "blocks", "the largest blocks", show=False),
        key("3", "show('between')", "between", "allocations and frees between mark and cursor", show=False),
        key("4", "show('segments')", "segments", "segments and blocks", show=False),
        key("5", "show('report')", "report", "fragmentation and out of memory in words", show=False),
        key("6", "show('difference')", "difference", "the difference of two files", show=False),
        key("left_square_bracket", "entry(-1)", "entry back", "one trace entry back", show=False),
        key("right_square_bracket", "entry(1)", "entry", "one trace entry on", bar="[ ]"),
        key("left_curly_bracket", "column(-10)", "far back", "ten columns back", show=False),
        key("right_curly_bracket", "column(10)", "far on", "ten columns on", show=False),
        key("home", "edge(-1)", "first", "before the first entry", show=False),
        key("end", "edge(1)", "last", "the last entry", show=False),
        key("pageup", "page(-1)", "page up", "a screen up", show=False),
        key("pagedown", "page(1)", "page down", "a screen down", show=False),
        key("d", "device", "device", "the next device"),
        *FILE_KEYS,
        key("q", "app.detach", "quit", "leave"),
    ]

    def __init__(self, app_state: AppState, explorer: Explorer) -> None:
        super().__init__(app_state)
        self.explorer = explorer

    def compose(self) -> ComposeResult:
        yield TooSmall(self.app_state, name="small")
        yield SnapshotTimeline(self.app_state, self.explorer, "timeline")
        yield SnapshotList(self.app_state, self.explorer, "rows")
        yield Prompt(self.app_state, "search", "function or file; enter keeps it, escape ends it", name="filter")
        yield KeyBar(self.app_state, name="keys")

    @property
    def rows(self) -> SnapshotList:
        return self.query_one(SnapshotList)

    @property
    def timeline(self) -> SnapshotTimeline:
        return self.query_one(SnapshotTimeline)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide keys that do not apply to this snapshot: an error, several devices, a second file."""
        if not super().check_action(action, parameters):
            return False
        explorer = self.explorer
        if action == "oom":
            return bool(explorer.replay.ooms)
        if action == "device":
            return len(explorer.replays) > 1
        if action == "show":
            return str(parameters[0]) in explorer.views
        return action not in ("branch", "fold") or explorer.view == "stacks"

    def _to(self, moment: int) -> None:
        self.explorer.move(moment)
        self.tick()

    def action_column(self, columns: int) -> None:
        self._to(self.timeline.moment_beside(columns))

    def action_entry(self, entries: int) -> None:
        self._to(self.explorer.cursor + entries)

    def action_edge(self, direction: int) -> None:
        self._to(-1 if direction < 0 else self.explorer.replay.last)

    def action_peak(self) -> None:
        self._to(self.explorer.replay.peak_index)

    def action_oom(self) -> None:
        """Move the cursor to the failed allocation; from there to the previous one."""
        ooms = self.explorer.replay.ooms
        self._to(next((index for index in reversed(ooms) if index < self.explorer.cursor), ooms[-1]))

    def action_mark(self) -> None:
        self.explorer.set_mark()
        self.app_state.show_message("marked: move the cursor, then 3" if self.explorer.mark is not None else "no mark")
        self.tick()

    def action_zoom(self, direction: int) -> None:
        self.explorer.zoom(direction > 0)
        self.tick()

    def action_fold(self) -> None:
        self.explorer.toggle_fold()
        self.rows.go_to(0)
        self.tick()

    def action_view(self, direction: int) -> None:
        views = self.explorer.views
        self.action_show(views[(views.index(self.explorer.view) + direction) % len(views)])

    def action_show(self, view: str) -> None:
        self.explorer.show(view)
        self.rows.go_to(0)
        self.refresh_bindings()
        self.tick()

    def action_device(self) -> None:
        self.explorer.next_device()
        self.rows.go_to(0)
        self.refresh_bindings()
        self.tick()

    def action_branch(self) -> None:
        row = self.rows.chosen
        if row is not None and row.branch:
            self.explorer.toggle(row.path, row.shown)
            self.tick()

    def filter_by(self, text: str) -> None:
        self.explorer.search(text)


class SnapshotApp(OneScreenApp):
    """The explorer of one snapshot, or of the difference of two."""

    TITLE = "ftmon snapshot"
    MAIN_SCREEN, HELP_SCREEN = SnapshotScreen, SnapshotHelp

    def __init__(
        self,
        replays: list[Replay],
        before: list[Replay] | None = None,
        *,
        ascii: bool = False,  # noqa: A002  (the name of the option)
        light: bool = False,
    ) -> None:
        super().__init__(ascii=ascii, light=light)
        self.explorer = Explorer(replays, before)

    def get_default_screen(self) -> Screen[Any]:
        return SnapshotScreen(self.app_state, self.explorer)


def run_explorer(replays: list[Replay], before: list[Replay] | None = None, *, ascii_only: bool = False) -> int:
    """Run until the user quits; return 0, or 1 if an error ended the app."""
    freeze_garbage_collector()
    app = SnapshotApp(replays, before, ascii=ascii_only)
    app.run()
    return app.return_code or 0
