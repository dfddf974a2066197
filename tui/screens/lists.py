"""Screens that are lists: alerts with the details of one; stacks of all ranks, equal ones as a group; their output."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ...protocol.messages import control
from ...protocol.messages.control import Alert
from ...protocol.messages.memory import Cause
from ...protocol.messages.telemetry import Stacks
from ...protocol.text import counted
from ..model.alerts import LogEntry
from ..model.oom import cause_of_alert
from ..model.rank import Row, rows
from ..widgets.alerts import alert_detail, alert_line, log_line
from ..widgets.base import Canvas, Listing, Prompt, pressing
from ..widgets.drawing import Line, ruled, width_of, wrap
from ..widgets.header import time_of_day
from ..widgets.state import AppState
from .base import ALERTS, BACK, LINE_KEYS, LOGS, ListScreen, key
from .dialogs import CommandStatus, refusal, suggested
from .memory import MemoryScreen


class StackList(Listing[Row]):
    """Groups of ranks, and their frames."""

    empty = "no stacks yet"
    waiting = False
    unfolded: frozenset[int] = frozenset()  # ranks whose group is shown with all threads
    _made: tuple[object, list[Row]] = (None, [])

    def _stack_ids(self) -> object:
        ranks = self.app_state.model.ranks
        return tuple((rank, id(one.stacks), id(one.native_stacks)) for rank, one in ranks.items() if one.stacks)

    def stacks(self) -> dict[int, Stacks]:
        return {rank: one.stacks for rank, one in self.app_state.model.ranks.items() if one.stacks is not None}

    def items(self) -> list[Row]:
        """Return the rows, cached until new stacks arrive or a group is folded."""
        made_for = (self._stack_ids(), self.unfolded)
        if self._made[0] != made_for:
            ranks = self.app_state.model.ranks
            native = {rank: one.native_stacks for rank, one in ranks.items() if one.native_stacks is not None}
            self._made = (made_for, rows(self.stacks(), native, self.unfolded))
        return self._made[1]

    def item(self, item: Row, width: int, selected: bool) -> Line:
        row, theme = item, self.theme
        ground = "raised" if selected else "background"
        indent = {"group": " ", "thread": "   "}.get(row.kind, "     ")
        tone = {"group": "accent", "thread": "text"}.get(row.kind, "text" if selected else "dim")
        style = theme.style(tone, ground, bold=row.kind == "group")
        return Line(theme.cut(indent + row.text, width), style).fit(width, theme.style("text", ground))

    def head(self, width: int) -> list[Line]:
        theme, stacks = self.theme, self.stacks()
        total = len(self.app_state.model.ranks)
        line = Line(f" stacks of {len(stacks)} of {counted(total, 'rank')} ", theme.style("text", bold=True))
        if stacks:
            newest = max(stacks.values(), key=lambda one: one.time)
            why = f", {newest.reason}" if newest.reason else ""
            text = theme.cut(f"taken at {time_of_day(newest.time)}{why} ", max(0, width - line.width - 2))
            line.add(text, theme.style("dim"))
        elif self.waiting:
            line.add("asked for ", theme.style("dim"))
        return [ruled(line, Line(), width, theme)]


class StacksScreen(ListScreen):
    """The stacks of every rank."""

    NAME = "stacks"
    WHAT = (
        "Where the training thread of each rank is, the innermost call first; ranks at the same place are one group, "
        "the largest first. Enter shows all threads of a group's first rank. A rank answers even when its training "
        "thread is stuck; a rank that holds the GIL in native code writes its stacks on a signal. s requests new "
        "stacks; t reads native frames with py-spy, if it is installed and allowed."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("s", "again", "again", "request the stacks of all ranks again"),
        key("enter", "unfold", "all threads", "all threads of this group's first rank, or only the training threads"),
        key("t", "native", "native", "native frames of this group's first rank, by py-spy"),
        key("left", "group(-1)", "group before", "the group before", show=False),
        key("right", "group(1)", "next group", "the group after"),
        *LINE_KEYS,
    ]

    def __init__(self, app_state: AppState) -> None:
        super().__init__(app_state)
        self._asking = CommandStatus(app_state)

    def body(self) -> Iterable[Widget]:
        yield StackList(self.app_state, name="lines")

    def on_mount(self) -> None:
        """Request stacks at once; if that is impossible, report it only if there are none to show."""
        if not refusal(self.app_state, "stacks") or not self.query_one(StackList).items():
            self.action_again()
        self.tick()

    def tick(self) -> None:
        self._asking.tick()
        self.query_one(StackList).waiting = self._asking.waiting
        super().tick()

    def action_again(self) -> None:
        self._ask(control.Stacks(), "the stacks of all ranks are asked for")

    def action_native(self) -> None:
        row = self.query_one(StackList).chosen
        if row is not None:
            self.query_one(StackList).unfolded |= {row.ranks[0]}
            self._ask(control.Stacks([row.ranks[0]], native=True), f"rank {row.ranks[0]}: native frames are asked for")

    def _ask(self, verb: control.Stacks, words: str) -> None:
        self._asking.ask(verb, words)
        self.tick()

    def action_unfold(self) -> None:
        lines = self.query_one(StackList)
        row = lines.chosen
        if row is None:
            return
        ranks = frozenset(row.ranks)
        lines.unfolded = lines.unfolded - ranks if lines.unfolded & ranks else lines.unfolded | {row.ranks[0]}
        self._go_to_group(row.ranks)

    def action_group(self, delta: int) -> None:
        lines = self.query_one(StackList)
        row = lines.chosen
        if row is None:
            return
        heads = [one.ranks for one in lines.items() if one.kind == "group"]
        index = max(0, min(heads.index(row.ranks) + delta, len(heads) - 1))
        self.app_state.select(heads[index][0])
        self._go_to_group(heads[index])

    def _go_to_group(self, ranks: tuple[int, ...]) -> None:
        lines = self.query_one(StackList)
        found = [index for index, one in enumerate(lines.items()) if one.kind == "group" and one.ranks == ranks]
        if found:
            lines.go_to(found[0])

    def in_question(self) -> set[int]:
        row = self.query_one(StackList).chosen
        return set(row.ranks) if row is not None and len(row.ranks) == 1 else super().in_question()


_BEFORE_TEXT = len(" 12:00:00 launcher err  ")


class LogList(Listing[LogEntry]):
    """The lines that pass the filter."""

    follow = True
    empty = "no lines"
    rank: int | None = None
    text = ""
    _entries: list[LogEntry]
    _made_of: object = None

    def items(self) -> list[LogEntry]:
        """Return the lines that pass the filter, cached until log or filter changes."""
        logs = self.app_state.model.logs
        made_of = (id(logs), logs.version, self.rank, self.text)
        if made_of != self._made_of:
            self._made_of = made_of
            self._entries = logs.select(rank=self.rank, text=self.text)
        return self._entries

    def item(self, item: LogEntry, width: int, selected: bool) -> Line:
        return log_line(item, width, self.theme, self.rank is None, selected and not self.follow)

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the lines and, if the view does not follow, the selected one in full below them where it is cut."""
        chosen, theme = None if self.follow else self.chosen, self.theme
        if chosen is None or width_of(chosen.text) + _BEFORE_TEXT < width:
            return super().draw(width, height)
        whole = wrap(chosen.text, width - 2)[: height // 2]
        below = [Line(theme.glyphs.rule * width, theme.style("rule"))]
        below += [Line(f" {text}", theme.style("text")) for text in whole]
        return [*super().draw(width, height - len(below)), *below]

    def head(self, width: int) -> list[Line]:
        theme = self.theme
        dim = theme.style("dim")
        who = "all ranks" if self.rank is None else "the launcher" if self.rank < 0 else f"rank {self.rank}"
        left = Line(f" output of {who} ", theme.style("text", bold=True))
        left.add(f"{len(self.items()):,} lines ", dim)
        if self.text:
            left.add(f"with {self.text!r} ", theme.style("accent"))
        right = Line(
            " following " if self.follow else " held: f follows ", theme.style("good" if self.follow else "dim")
        )
        return [ruled(left, right, width, theme)]


class LogsScreen(ListScreen):
    """The output of the run."""

    NAME = "logs"
    WHAT = (
        "Output of the ranks and the launcher, oldest first. Left and right select a rank; / filters by text. The "
        "view follows the end until you scroll up, and shows a line that is cut in full; f follows again."
    )
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("slash", "filter", "filter", "show only lines that contain a text"),
        key("left", "whose(-1)", "rank", "the output of another rank"),
        key("right", "whose(1)", "next rank", "the output of the next rank", show=False),
        key("f", "follow", "follow", "follow the end"),
        *LINE_KEYS,
        key("home", "end(0)", "first", "the first line", show=False),
        key("end", "end(-1)", "last", "the last line", show=False),
        ALERTS,
    ]

    def body(self) -> Iterable[Widget]:
        yield LogList(self.app_state, name="logs")
        yield Prompt(self.app_state, "filter", "words; enter keeps it, escape ends it", name="filter")

    def action_whose(self, delta: int) -> None:
        """Select the next source: all ranks, the launcher, rank 0, 1, ..."""
        lines = self.query_one(LogList)
        model = self.app_state.model
        # A rank that failed before its first message has lines, although it is not in the model's ranks.
        order: list[int | None] = [None, -1, *sorted({*model.ranks, *model.logs.ranks} - {-1})]
        index = order.index(lines.rank) if lines.rank in order else 0
        lines.rank = order[(index + delta) % len(order)]
        lines.tick()

    def action_follow(self) -> None:
        self.query_one(LogList).follow = True
        self.tick()

    def action_end(self, index: int) -> None:
        lines = self.query_one(LogList)
        lines.follow = index < 0
        lines.go_to(index)

    def filter_by(self, text: str) -> None:
        self.query_one(LogList).text = text


class AlertList(Listing[Alert]):
    """Unresolved alerts first, then resolved ones, each newest first."""

    text = ""

    @property
    def empty(self) -> str:
        replay = self.app_state.source is not None and self.app_state.source.transport.mode == "replay"
        return "no alert in this recording" if replay else "no alerts: nothing to report"

    def items(self) -> list[Alert]:
        wanted = self.text.casefold()
        found = pressing(list(self.app_state.model.alerts))
        return [alert for alert in found if wanted in f"{alert.kind} {alert.title} {alert.text}".casefold()]

    def item(self, item: Alert, width: int, selected: bool) -> Line:
        return alert_line(item, width, self.theme, selected)


class AlertDetail(Canvas):
    """The details of the selected alert."""

    alert: Alert | None = None
    top = 0
    unfolded = False  # whether to show all stacks of a spike's cause, with all frames

    def _cause(self) -> Cause | None:
        ranks = self.app_state.model.ranks
        causes = {number: rank.memory.causes for number, rank in ranks.items() if rank.memory.causes}
        return cause_of_alert(self.alert, causes) if self.alert is not None else None

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        rule = Line(theme.glyphs.rule * width, theme.style("rule"))
        if self.alert is None:
            return [rule]
        body = alert_detail(self.alert, width, theme, self._cause(), self.unfolded)
        self.top = max(0, min(self.top, len(body) - height + 1))
        shown = body[self.top : self.top + height - 1]
        if self.top + height - 1 < len(body):
            shown[-1] = Line(f"   {theme.glyphs.ellipsis} page down for more", theme.style("dim"))
        return [rule, *shown]


class AlertsScreen(ListScreen):
    """All alerts."""

    NAME = "alerts"
    WHAT = (
        "Alerts: spikes, hangs, slow ranks, out-of-memory errors, dead ranks. Below the list is the selected alert "
        "with its evidence, the figures it is based on. Enter opens its rank or, for a spike, the full stacks that "
        "allocated it; m opens the memory screen of its rank and phase; j moves a replay (or the view of a live run) "
        "to the moment it was raised."
    )
    LEGEND = ("alerts",)
    TITLE_LINES = 1
    BINDINGS: ClassVar[list[BindingType]] = [
        BACK,
        key("up", "move(-1)", "up", "the alert above", show=False),
        key("down", "move(1)", "down", "the alert below", show=False),
        key("pageup", "page(-1)", "page up", "scroll the evidence up", show=False),
        key("pagedown", "page(1)", "page down", "scroll the evidence down", show=False),
        key("enter", "open_alert", "open", "open the alert's rank; for a spike, its full stacks"),
        key("m", "memory", "memory", "the memory of the alert's rank and phase"),
        key("j", "jump", "jump there", "go to the moment it was raised"),
        key("slash", "filter", "filter", "show only alerts that contain a text"),
        LOGS,
    ]

    def body(self) -> Iterable[Widget]:
        yield AlertList(self.app_state, name="alert-list")
        yield AlertDetail(self.app_state, name="alert-detail")
        yield Prompt(self.app_state, "filter", "kind, rank or words; enter keeps it, escape ends it", name="filter")

    def tick(self) -> None:
        detail, alerts = self.query_one(AlertDetail), self.query_one(AlertList)
        detail.alert = alerts.chosen
        super().tick()

    def action_move(self, delta: int) -> None:
        detail = self.query_one(AlertDetail)
        if detail.unfolded:
            detail.top = max(0, detail.top + delta)
        else:
            detail.top = 0
            self.query_one(AlertList).move(delta)
        self.tick()

    def action_page(self, direction: int) -> None:
        detail = self.query_one(AlertDetail)
        detail.top = max(0, detail.top + direction * max(1, detail.size.height - 2))
        self.tick()

    async def action_open_alert(self) -> None:
        """Open the rank; for a spike or leak, toggle the full cause; for a failed allocation, open its report."""
        alert = self.query_one(AlertList).chosen
        if alert is not None and alert.kind in ("spike", "leak"):
            detail = self.query_one(AlertDetail)
            detail.unfolded, detail.top = not detail.unfolded, 0
            self.set_class(detail.unfolded, "unfolded")
            self.call_after_refresh(self.tick)
        elif alert is not None and self._select_rank(alert):
            out_of_memory = alert.kind == "oom" and len(self.app_state.model.ooms)
            await self.run_action(f"app.oom({alert.rank})" if out_of_memory else "app.open")

    def action_memory(self) -> None:
        alert = self.query_one(AlertList).chosen
        if alert is not None and self._select_rank(alert):
            self.app.show(MemoryScreen(self.app_state, alert.phase))  # type: ignore[attr-defined]

    def _select_rank(self, alert: Alert) -> bool:
        cause_rank = alert.evidence.get("cause_rank")
        rank = alert.rank if alert.rank is not None else next(iter(alert.ranks), None)
        rank = cause_rank if rank is None and isinstance(cause_rank, int) else rank
        if rank is None:
            self.app_state.show_message("this alert is not about a single rank")
            return False
        self.app_state.select(rank)
        return True

    def action_jump(self) -> None:
        alert, source = self.query_one(AlertList).chosen, self.app_state.source
        if alert is not None and source is not None:
            source.transport.to_alert(alert.id)
            self.app_state.show_message(f"at the moment of: {alert.title}")

    def in_question(self) -> set[int]:
        return suggested(self.app_state.model, self.app_state.selected, self.query_one(AlertList).chosen)

    def filter_by(self, text: str) -> None:
        self.query_one(AlertList).text = text
