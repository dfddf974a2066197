"""The alerts: a list, and the details of the selected one with its evidence."""

from collections.abc import Iterable
from typing import ClassVar

from textual.binding import BindingType
from textual.widget import Widget

from ...protocol.messages.control import Alert
from ...protocol.messages.memory import Cause
from ..model.oom import cause_of_alert
from ..widgets.alerts import alert_detail, alert_line
from ..widgets.base import Canvas, Listing, Prompt, pressing
from ..widgets.drawing import Line
from .base import BACK, LOGS, ListScreen, key
from .dialogs import suggested
from .memory import MemoryScreen


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

    def key(self) -> object:
        return id(self.app_state.model.alerts), self.app_state.model.alerts.version, self.text, self.selected

    def item(self, item: Alert, width: int, selected: bool) -> Line:
        return alert_line(item, width, self.theme, selected)


class AlertDetail(Canvas):
    """The details of the selected alert."""

    alert: Alert | None = None
    top = 0
    unfolded = False  # whether to show all stacks of a spike's cause, with all frames

    def key(self) -> object:
        return self.alert, self.top, self.unfolded, id(self._cause())

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
