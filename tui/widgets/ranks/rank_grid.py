"""Shows all ranks: as cards if they fit, else one line each, else a heat map; with a selection moved by arrows."""

from typing import Literal, NamedTuple

from textual.containers import Container
from textual.widget import Widget

from ..base.canvas import Canvas
from ..drawing.line import Line
from ..lines.log_lines import log_line
from ..state.app_state import AppState
from ..state.rank_view import RankView
from ..state.view_models import History, rank_views, scale_of
from . import heat, rows
from .card import FIXED_LINES, card

CARD_WIDTH, CARD_HEIGHT = 36, FIXED_LINES + 2
"""Size of the smallest card with all figures."""

_RATIO = 6.0
"""Preferred ratio of width to height of a card."""


class Plan(NamedTuple):
    """Layout of ranks: ``columns`` cards or rows side by side."""

    mode: Literal["cards", "rows", "heat", "empty"]
    columns: int = 1
    rows: int = 1
    """Rows of cards, or lines of ranks, that fit at once."""
    card_height: int = 0
    """Lines of a card, or of one rank's row."""


def card_plan(ranks: int, width: int, height: int, scrolls: bool = False) -> Plan | None:
    """Return a layout in which all cards fit and none is too flat or too tall; None if they do not fit."""
    best: tuple[float, Plan] | None = None
    for columns in range(1, min(4, ranks, max(1, width // CARD_WIDTH)) + 1):
        lines = -(-ranks // columns)
        card_height = height // lines
        if card_height < CARD_HEIGHT:
            continue
        ratio = (width / columns) / card_height
        holes = lines * columns - ranks
        badness = abs(ratio - _RATIO) / min(ratio, _RATIO) + holes / ranks
        if best is None or badness < best[0]:
            best = badness, Plan("cards", columns, lines, card_height)
    if best is None and scrolls:
        columns = max(1, min(4, width // CARD_WIDTH))
        return Plan(
            "cards", columns, max(1, height // CARD_HEIGHT), max(CARD_HEIGHT, height // max(1, height // CARD_HEIGHT))
        )
    return best[1] if best else None


def plan(ranks: int, width: int, height: int, view: str = "auto") -> Plan:
    """Return the layout of ``ranks`` ranks in ``width`` x ``height`` cells."""
    if ranks == 0:
        return Plan("empty")
    row_columns = max(1, min(width // rows.NARROWEST, -(-ranks // max(1, height - 1))))
    per_column = -(-ranks // row_columns)
    row_height = max(1, min(4, (height - 1) // per_column))
    row_plan = Plan("rows", row_columns, min(per_column, max(1, (height - 1) // row_height)), row_height)
    if view == "cards":
        return card_plan(ranks, width, height, scrolls=True) or row_plan
    if view == "rows":
        return row_plan
    if view == "heat":
        return Plan("heat")
    cards = card_plan(ranks, width, height)
    if cards is not None:
        return cards
    return row_plan if ranks <= row_plan.rows * row_columns else Plan("heat")


class Waiting(Canvas):
    """Shown before the first rank: a note, and the run's output meanwhile."""

    def key(self) -> object:
        model = self.app_state.model
        return id(model.logs), model.logs.version, model.state, model.ended

    def draw(self, width: int, height: int) -> list[Line]:
        theme, model = self.theme, self.app_state.model
        words = "the run ended before any rank reported" if model.ended else "waiting for the first rank"
        entries = model.logs.select(limit=max(0, height - 4))
        lines = [
            Line(),
            Line(f" {theme.glyphs.states['starting']} {words}", theme.style("warning" if model.ended else "dim")),
        ]
        return [*lines, Line(), *(log_line(entry, width, theme) for entry in entries)]


class Card(Canvas):
    """One rank's card."""

    def __init__(self, app_state: AppState) -> None:
        super().__init__(app_state)
        self.rank: int | None = None
        self._history = History()
        self._view: RankView | None = None

    def show(self, view: RankView | None) -> None:
        self._view = view
        self.rank = view.rank if view else None
        self.tick()

    def key(self) -> object:
        view, app_state = self._view, self.app_state
        if view is None or view.rank not in app_state.model.ranks:
            return ()
        model = app_state.model
        columns = self._history.columns(model.ranks[view.rank], max(1, self.size.width - 2), model.now, app_state.span)
        return view, columns, scale_of(view, app_state.zoom, app_state.run_peak), app_state.selected == view.rank

    def draw(self, width: int, height: int) -> list[Line]:
        view, app_state = self._view, self.app_state
        if view is None or view.rank not in app_state.model.ranks:
            return []
        columns = self._history.columns(
            app_state.model.ranks[view.rank], max(1, width - 2), app_state.model.now, app_state.span
        )
        scale = scale_of(view, app_state.zoom, app_state.run_peak)
        return card(view, columns, width, height, scale, self.theme, app_state.selected == view.rank)

    def on_click(self) -> None:
        if self.rank is not None:
            self.app_state.select(self.rank)


class RowPart(Canvas):
    """One column of the rows of ranks, such as all graphs; a separate widget, as Textual sends lines from its edge."""

    def __init__(self, app_state: AppState, part: int) -> None:
        super().__init__(app_state)
        self.part = part
        self.views: list[RankView] = []
        self.row_height = 1
        self._histories: dict[int, History] = {}

    def show(self, views: list[RankView], row_height: int) -> None:
        self.views, self.row_height = views, row_height
        self.tick()

    def key(self) -> object:
        """Return a value that changes with the views; None for the graphs, which are always redrawn and compared."""
        if self.part == 1:
            return None
        selected = self.app_state.selected if self.part == 0 else None
        return [self._relevant(view) for view in self.views], selected

    def _relevant(self, view: RankView) -> object:
        if self.part == 0:
            return view.rank, view.state, view.state_seconds, view.spikes, view.device
        if self.part == 2:
            return view.allocated, view.peak, view.behind
        return view.shares, view.text, view.state, view.utilization, view.temperature, view.power, view.host_memory

    def draw(self, width: int, height: int) -> list[Line]:
        heads = rows.heading(rows.Parts(width, width, width, width), self.views[0] if self.views else None, self.theme)
        lines = [heads[self.part]]
        for view in self.views:
            lines += self._row(view, width)
        return lines

    def _row(self, view: RankView, width: int) -> list[Line]:
        app_state, theme, height = self.app_state, self.theme, self.row_height
        if self.part == 0:
            return rows.label(view, width, height, theme, view.rank == app_state.selected)
        if self.part == 2:
            return rows.figures(view, width, height, theme)
        if self.part == 3:
            return rows.last(view, width, height, theme)
        rank = app_state.model.ranks.get(view.rank)
        history = self._histories.setdefault(view.rank, History())
        columns = history.columns(rank, width - 2, app_state.model.now, app_state.span) if rank else []
        return rows.graph(columns, width, height, scale_of(view, app_state.zoom, app_state.run_peak), theme)


class HeatMap(Canvas):
    """The heat map, and a line on the selected rank below it."""

    def __init__(self, app_state: AppState) -> None:
        super().__init__(app_state)
        self.views: list[RankView] = []
        self.columns = 1

    def show(self, views: list[RankView]) -> None:
        self.views = views
        self.tick()

    def key(self) -> object:
        chosen = next((view for view in self.views if view.rank == self.app_state.selected), None)
        return [(view.state, round(view.share, 2)) for view in self.views], chosen

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the map, scrolled so that the selection is in view, the selected rank's figures, and the legend."""
        grid = heat.plan(len(self.views), width, height - 1)
        self.columns = grid.columns
        index = next((i for i, view in enumerate(self.views) if view.rank == self.app_state.selected), 0)
        shown = max(1, (height - 1) // grid.height)
        first = max(0, min(index // grid.columns - shown // 2, grid.rows(len(self.views)) - shown))
        lines = heat.heat_map(self.views, grid, first, height - 1, index, self.theme)
        lines += [Line()] * (height - 1 - len(lines))
        return [*lines, heat.chosen_line(self.views[index], width, self.theme)] if self.views else []


class RankGrid(Container):
    """The area of all ranks."""

    def __init__(self, app_state: AppState) -> None:
        super().__init__(id="fleet")
        self.app_state = app_state
        self.plan = Plan("empty")
        self.first = 0
        """The first row of cards, or first rank of rows, in view."""
        self._views: list[RankView] = []
        self._shape: tuple[object, ...] = ()
        self._cards: list[Card] = []
        self._parts: list[list[RowPart]] = []
        self._heat: HeatMap | None = None
        self._waiting: Waiting | None = None

    def tick(self) -> None:
        app_state = self.app_state
        app_state.select_valid()
        width, height = self.size
        if not width or not height:
            return
        self._views = rank_views(app_state.model)
        self.plan = plan(len(self._views), width, height, app_state.view)
        shape = (self.plan, width, height)
        if shape != self._shape:
            self._shape = shape
            self._rebuild(width, height)
        self._scroll()
        self._show()

    def _show(self) -> None:
        if self.plan.mode == "cards":
            begin = self.first * self.plan.columns
            for index, widget in enumerate(self._cards):
                widget.show(self._views[begin + index] if begin + index < len(self._views) else None)
        elif self.plan.mode == "rows":
            begin = self.first
            for parts in self._parts:
                for part in parts:
                    part.show(self._views[begin : begin + self.plan.rows], self.plan.card_height)
                begin += self.plan.rows
        elif self._heat is not None:
            self._heat.show(self._views)
        elif self._waiting is not None:
            self._waiting.tick()

    def _rebuild(self, width: int, height: int) -> None:
        """Make the widgets of the layout."""
        self.remove_children()
        self._cards, self._parts, self._heat, self._waiting = [], [], None, None
        if self.plan.mode == "cards":
            self._build_cards(width)
        elif self.plan.mode == "rows":
            self._build_rows(width, height)
        elif self.plan.mode == "heat":
            self._heat = HeatMap(self.app_state)
            self._place(self._heat, 0, 0, width, height)
        else:
            self._waiting = Waiting(self.app_state)
            self._place(self._waiting, 0, 0, width, height)
        made: list[Canvas | None] = [*self._cards, self._heat, self._waiting]
        made += [part for parts in self._parts for part in parts]
        self.mount_all([widget for widget in made if widget is not None])

    def _build_cards(self, width: int) -> None:
        columns, lines = self.plan.columns, self.plan.rows
        # All cards have equal heights, so that their graphs are comparable; spare lines stay empty.
        tall, y = self.plan.card_height, 0
        for line in range(lines):
            for column in range(columns):
                if line * columns + column >= len(self._views):
                    break
                x, end = width * column // columns, width * (column + 1) // columns
                self._cards.append(Card(self.app_state))
                self._place(self._cards[-1], x, y, end - x, tall)
            y += tall

    def _build_rows(self, width: int, height: int) -> None:
        for column in range(self.plan.columns):
            x, end = width * column // self.plan.columns, width * (column + 1) // self.plan.columns
            parts: list[RowPart] = []
            for index, part_width in enumerate(rows.parts(end - x)):
                parts.append(RowPart(self.app_state, index))
                self._place(parts[-1], x, 0, part_width, height)
                x += part_width
            self._parts.append(parts)

    @staticmethod
    def _place(widget: Widget, x: int, y: int, width: int, height: int) -> None:
        styles = widget.styles
        styles.position = "absolute"
        styles.offset = (x, y)
        styles.width, styles.height = width, height

    def _index(self) -> int:
        return next((i for i, view in enumerate(self._views) if view.rank == self.app_state.selected), 0)

    def _scroll(self) -> None:
        """Keep the selection in view."""
        if self.plan.mode == "cards":
            line, shown = self._index() // self.plan.columns, self.plan.rows
            total = -(-len(self._views) // self.plan.columns)
        elif self.plan.mode == "rows":
            line, shown = self._index(), self.plan.rows * self.plan.columns
            total = len(self._views)
        else:
            return
        self.first = max(line - shown + 1, min(self.first, line))
        self.first = max(0, min(self.first, total - shown))

    def move(self, dx: int, dy: int) -> None:
        """Move the selection by cells of the present layout."""
        if not self._views:
            return
        if self.plan.mode == "cards":
            step = dx + dy * self.plan.columns
        elif self.plan.mode == "rows":
            step = dx * self.plan.rows + dy
        else:
            step = dx + dy * (self._heat.columns if self._heat else 1)
        index = self._index() + step
        if 0 <= index < len(self._views):
            self.app_state.select(self._views[index].rank)
            self.tick()
