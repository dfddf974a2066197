"""Shows all ranks: as cards if they fit, else one line each, else a heat map; with a selection moved by arrows."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

from textual.events import Click

from ...protocol.text import duration, sanitize
from ..model.rank import RankModel, allocations
from ..model.run import RunModel
from .alerts import log_line
from .base import Canvas
from .drawing import Line, Theme, count, fitting, gib, loss, milliseconds, small, spread, step_time, width_of, wrap
from .plots import SHORT, Column, Scale, memory_graph, phase_bar
from .state import AppState, RankView, columns_of, rank_views, scale_of

FIXED_LINES = 4  # lines of a card besides its graph: title, figures, phases, health


def card(
    view: RankView,
    columns: Sequence[Column | None],
    width: int,
    height: int,
    scale: Scale,
    theme: Theme,
    selected: bool,
) -> list[Line]:
    """Draw a card of ``width`` x ``height`` cells (at least 30 x 6)."""
    inner = width - 2
    lines = [title(view, width, theme, selected)]
    body = memory_graph(columns, inner, max(1, height - FIXED_LINES), scale, theme)
    body += [figures(view, inner, theme), *foot(view, inner, theme)]
    margin = theme.base
    lines.extend(Line(" ", margin).join(line).fit(width, margin) for line in body)
    return lines


def title(view: RankView, width: int, theme: Theme, selected: bool) -> Line:
    """Draw the rule above a card, with the rank's name at its left and its state at its right."""
    rule = theme.style("accent" if selected else "rule")
    glyph, tone = theme.state(view.state)
    dash = theme.glyphs.rule
    left = Line(theme.glyphs.selected if selected else dash, rule).add(" ", theme.base)
    left.add(glyph, theme.style(tone)).add(" ", theme.base)
    left.add(name(view, theme), theme.style("accent" if selected else "text", bold=True)).add(" ", theme.base)
    right = Line()
    if view.spikes:
        right.add(f" {theme.glyphs.spike} {view.spikes}", theme.style("warning")).add(" ", theme.base)
    if view.state != "training":
        right.add(" " + state_words(view), theme.style(tone, bold=view.in_trouble)).add(" ", theme.base)
    right.add(dash, rule)
    gap = max(0, width - left.width - right.width)
    return spread(left.add(dash * gap, rule), right, width, theme.base)


def name(view: RankView, theme: Theme) -> str:
    """Return a rank's name: ``GPU 0 · rank 0``, with its host if there are several."""
    parts = [view.device, f"rank {view.rank}", view.host]
    return f" {theme.glyphs.dot} ".join(part for part in parts if part)


def state_words(view: RankView) -> str:
    """Return a state and how long it has lasted: ``hung 34 s``."""
    if view.in_trouble and view.state_seconds is not None and view.state_seconds >= 1:
        return f"{view.state} {duration(int(view.state_seconds))}"
    return view.state


def figures(view: RankView, width: int, theme: Theme) -> Line:
    """Draw allocated, peak, and reserved (on the CPU resident) memory, in GiB."""
    solid, behind = view.words
    parts = ((solid, view.allocated, "text"), ("peak", view.peak, "peak"), (behind, view.behind, "dim"))
    line = Line()
    for short, gap in ((False, "  "), (True, "  "), (True, " ")):
        line = Line()
        for word, value, tone in parts:
            line.add(f"{gap if line.width else ''}{word} ", theme.style("dim"))
            line.add(gib(value, short) if value else "-", theme.style(tone))
        line.add(" GiB", theme.style("dim"))
        if line.width <= width:
            break
    share = f"{view.share * 100:.0f} %" if view.capacity else ""
    right = Line(share, theme.style("dim"))
    phase = sanitize(view.peak_phase, 12)
    for name in (phase, SHORT.get(phase, phase)) if phase and share else ():
        words = f"peak in {name} {theme.glyphs.dot} {share}"
        if line.width + len(words) < width - 3:
            right = Line(words, theme.style("dim"))
            break
    return spread(line, right if line.width + right.width < width - 1 else Line(), width, theme.base)


def foot(view: RankView, width: int, theme: Theme) -> list[Line]:
    """Draw phase shares and health in two lines; a problem with a longer text uses both."""
    if view.in_trouble and width_of(view.text) + 2 > width:
        glyph, tone = theme.state(view.state)
        style = theme.style(tone)
        first, *rest = wrap(view.text, width - 2)
        second = theme.cut(" ".join(rest), width - 2)
        return [Line(f"{glyph} {first}", style), Line(f"  {second}", style)]
    return [phase_bar(view.shares, width, theme), health(view, width, theme)]


def health(view: RankView, width: int, theme: Theme) -> Line:
    """Draw utilisation, power and temperature; for a rank with a problem its text instead."""
    if view.in_trouble or (view.text and view.state in ("starting", "failed")):
        glyph, tone = theme.state(view.state)
        return Line(theme.cut(f"{glyph} {view.text or view.state}", width), theme.style(tone)).fit(width, theme.base)
    right = Line()
    if view.throttled:
        right.add(f"{theme.glyphs.warning} {view.throttled}", theme.style("warning"))
    elif view.step_seconds is not None:
        right.add(f"{step_time(view.step_seconds)}/step", theme.style("dim"))
    line = Line(health_words(view, width - right.width, theme), theme.style("dim"))
    return spread(line, right, width, theme.base)


def health_words(view: RankView, width: int, theme: Theme) -> str:
    """Return utilisation, power and temperature, or the host's of a rank on the CPU, as far as they fit."""
    label = "util" if view.measure == "cuda" else "host CPU"
    used, total = view.host_memory or (0, 0)
    words = (
        (view.utilization, f"{label} {{:.0f}} %"),
        (view.power, "{:.0f} W"),
        (view.temperature, f"{{:.0f}} {theme.glyphs.degree}"),
        (view.host_memory, f"RAM {used / 2**30:.1f}/{total / 2**30:.0f} GiB"),
    )
    return fitting((form.format(value) for value, form in words if value is not None), "  ", width)


GROUP = 8  # ranks between gaps: the devices of a usual node
LABEL = 5

_SIZES = sorted(
    ((width, height) for width in range(2, 10) for height in range(1, 5) if height * 1.5 < width or height == 1),
    key=lambda size: (size[0] * size[1], size[0]),
    reverse=True,
)


class Grid(NamedTuple):
    """Layout of the cells: ``width`` x ``height`` characters each, ``columns`` per row."""

    width: int
    height: int
    columns: int

    def rows(self, ranks: int) -> int:
        return -(-ranks // self.columns)


def plan(ranks: int, width: int, height: int) -> Grid:
    """Return the layout with the largest cells with which all ranks fit, else the smallest (the map then scrolls)."""
    grid = Grid(2, 1, GROUP)
    for cell_width, cell_height in _SIZES:
        groups = max(1, (width - LABEL + 1) // (GROUP * cell_width + 1))
        columns = min(groups * GROUP, -(-ranks // GROUP) * GROUP)
        if GROUP * cell_width + LABEL > width:
            continue
        grid = Grid(cell_width, cell_height, columns)
        if grid.rows(ranks) * cell_height <= height:
            break
    return grid


def heat_map(
    views: Sequence[RankView], grid: Grid, first_row: int, height: int, selected: int, theme: Theme
) -> list[Line]:
    """Draw rows of cells from ``first_row`` on, at most ``height`` lines. ``selected`` is an index into ``views``."""
    lines: list[Line] = []
    for row in range(first_row, grid.rows(len(views))):
        begin = row * grid.columns
        for part in range(grid.height):
            label = f"{views[begin].rank:>{LABEL - 1}} " if part == (grid.height - 1) // 2 else " " * LABEL
            line = Line(label, theme.style("dim"))
            for index in range(begin, min(begin + grid.columns, len(views))):
                if index > begin and (index - begin) % GROUP == 0:
                    line.add(" ", theme.base)
                _cell(line, views[index], grid, part, index == selected, theme)
            lines.append(line)
            if len(lines) == height:
                return lines
    return lines


def _cell(line: Line, view: RankView, grid: Grid, part: int, selected: bool, theme: Theme) -> None:
    inner = grid.width - 1
    middle = part == (grid.height - 1) // 2
    text = (_text(view, inner, theme) if middle else "").center(inner)
    sound = view.state == "training"
    if not theme.color:
        line.add(f"{text}<" if selected and middle else text + " ", theme.style(bold=not sound, reverse=selected))
        return
    ink, ground = _colors(view, theme)
    if selected:
        ink, ground = theme.palette.on_color, theme.palette.accent
    line.add(text, theme.style(ink, ground, bold=selected or not sound)).add(" ", theme.base)


def _text(view: RankView, width: int, theme: Theme) -> str:
    share = min(1.0, view.share)
    percent = f"{share * 100:.0f}" if view.peak else ""
    if view.state != "training":
        glyph = theme.state(view.state)[0]
        return f"{glyph} {percent}" if percent and width >= len(percent) + 2 else glyph
    if 1 < width >= len(percent):
        return percent
    return str(min(9, int(share * 10))) if view.peak else " "


def _colors(view: RankView, theme: Theme) -> tuple[str, str]:
    palette = theme.palette
    if view.state in ("finished", "starting"):
        return palette.dim, palette.raised
    if view.state != "training":
        return palette.on_color, theme.tone(theme.state(view.state)[1])
    if not view.peak:
        return palette.dim, palette.raised
    # The ramp departs from the background: the foreground changes where its contrast would end.
    deep = min(1.0, view.share) >= 0.45
    return (palette.on_color if deep else palette.text), theme.heat(view.share)


def chosen_line(view: RankView, width: int, theme: Theme) -> Line:
    """Draw the figures of the selected rank, and at the right the legend of colours."""
    glyph, tone = theme.state(view.state)
    line = Line(f" {theme.glyphs.selected} ", theme.style("accent")).add(f"{glyph} ", theme.style(tone))
    line.add(name(view, theme), theme.style("accent", bold=True))
    solid, behind = view.words
    words = f"  {solid} {gib(view.allocated)}  peak {gib(view.peak)}  {behind} {gib(view.behind)} GiB"
    line.add(words, theme.style("dim"))
    if view.state != "training":
        line.add(f"  {state_words(view)}", theme.style(tone, bold=True))
        line.add(f": {view.text}" if view.text else "", theme.style(tone))
    ramp = Line("peak 0 ", theme.style("dim"))
    if theme.color:
        for color in theme.palette.heat:
            ramp.add(" ", theme.style("text", color))
    else:
        ramp.add("0..9", theme.base)
    ramp.add(" 100 % ", theme.style("dim"))
    return spread(line, ramp, width, theme.base) if line.width + ramp.width < width else line


Pairs = list[tuple[str, str]]


def figure_lines(model: RunModel, rank: RankModel, view: RankView, width: int, theme: Theme) -> list[Line]:
    """Draw the figures as name and value pairs, as many per line as fit."""
    lines = [_pairs(pairs, width, theme) for pairs in (_process(rank), _training(rank), _memory(rank, view))]
    if view.in_trouble or view.text:
        glyph, tone = theme.state(view.state)
        text = f" {glyph} {state_words(view)}: {view.text or 'no more is known'}"
        lines.append(Line(theme.cut(text, width), theme.style(tone, bold=True)))
    else:
        lines.append(Line(" ", theme.base).join(health(view, width - 2, theme)))
    if width >= 100 or model.hub is None:
        lines.append(_pairs(_monitor(rank), width, theme))
    return lines


def _pairs(pairs: Pairs, width: int, theme: Theme) -> Line:
    line = Line(" ", theme.base)
    for name, value in pairs:
        if line.width + len(name) + len(value) + 2 > width:
            break
        line.add(f"{name} " if name else "", theme.style("dim")).add(f"{value}   ", theme.base)
    return line


def _process(rank: RankModel) -> Pairs:
    hello = rank.hello
    if hello is None:
        return [("process", "no report yet")]
    found = [("pid", f"{hello.pid} on {hello.host}"), ("device", hello.device.name)]
    stage = f"ZeRO-{hello.zero_stage}" if hello.zero_stage is not None else hello.framework
    found += [("", words) for words in (stage, hello.precision) if words]
    return found + [(name, hello.versions[name]) for name in ("torch", "deepspeed") if name in hello.versions]


def _training(rank: RankModel) -> Pairs:
    last = rank.last
    if last is None:
        return [("step", "none finished yet")]
    found = [("step", f"{last.step:,}")]
    if last.batch_shape:
        batch = " x ".join(map(str, last.batch_shape))
        found.append(("batch", f"{batch} x {last.micro_steps}" if last.micro_steps > 1 else batch))
    if last.tokens:
        pads = 1 - last.tokens / last.padded_tokens if last.padded_tokens else 0
        found.append(("tokens", count(last.tokens) + (f", {pads * 100:.0f} % pads" if pads > 0.005 else "")))
    elif last.batch_shape:
        found.append(("elements", count(prod(last.batch_shape))))
    several = [each for each in last.updates if each.loss is not None] if len(last.updates) > 1 else []
    found += [(f"loss {sanitize(each.name, 20)}", loss(each.loss)) for each in several if each.loss is not None]
    found += [("loss", loss(last.loss))] if last.loss is not None and not several else []
    found += [("lr", small(last.lr))] if last.lr is not None else []
    found += [("grad norm", small(last.grad_norm))] if last.grad_norm is not None else []
    found += [("loss scale", count(last.loss_scale))] if last.loss_scale is not None else []
    found += [("", "overflow: update skipped")] if last.overflow else []
    return found


def _memory(rank: RankModel, view: RankView) -> Pairs:
    solid, behind = view.words
    found = [(solid, gib(view.allocated)), (behind, f"{gib(view.behind)} GiB")]
    if rank.peak is not None:
        peak = rank.peak
        step = f"{'after ' if peak.after else ''}step {peak.step:,}"
        found.append(("peak", f"{gib(peak.bytes)} GiB in {peak.phase}, {step}"))
    if rank.last is not None and not rank.on_cpu:
        found += [("retries", f"{rank.last.retries}"), ("OOMs", f"{rank.last.ooms}")]
    if rank.on_cpu:
        found.append(("measured by", "glibc, peaks by resident set"))
    return found


def _monitor(rank: RankModel) -> Pairs:
    last = rank.last
    found = [("ftmon cost", f"{milliseconds(last.probe_us)} ms of the last step")] if last is not None else []
    if last is not None and last.memory_every > 1:
        found.append(("memory, device time", f"by phase in 1 of {last.memory_every} steps"))
    found.append(("dropped messages", f"{rank.dropped:,}"))
    events = rank.allocator.last
    if events is not None:
        found.append(("allocator", f"{allocations(events):,} allocations in step {events.step:,}"))
    return found


NARROWEST = 76  # minimum width of a row in cells; from twice that on there are two rows side by side


class Parts(NamedTuple):
    """Widths of a row's parts, in cells."""

    label: int
    graph: int
    figures: int
    phases: int


def row_parts(width: int) -> Parts:
    """Return the parts of a row of this width."""
    label, figures = 16, 21
    rest = max(20, width - label - figures)
    phases = min(44, max(20, rest * 2 // 5))
    return Parts(label, rest - phases, figures, phases)


def label(view: RankView, width: int, height: int, theme: Theme, selected: bool) -> list[Line]:
    """Draw rank number and state, and below them the device and the number of spikes."""
    glyph, tone = theme.state(view.state)
    line = Line(theme.glyphs.selected if selected else " ", theme.style("accent"))
    line.add(f"{view.rank:>3} ", theme.style("accent" if selected else "text", bold=True))
    line.add(glyph + " ", theme.style(tone))
    spikes = Line(f"{theme.glyphs.spike} {view.spikes} " if view.spikes else "", theme.style("warning"))
    if view.in_trouble or view.state != "training":
        line.add(theme.cut(state_words(view), width - line.width - 1), theme.style(tone, bold=view.in_trouble))
    elif height == 1:
        line.join(spikes)
        if view.host:
            line.add(theme.cut(view.host, max(0, width - line.width - 1)), theme.style("dim"))
    below = Line(f"    {view.device} ", theme.style("dim")).join(spikes)
    if view.host and height > 1:
        below.add(theme.cut(view.host, max(0, width - below.width - 1)), theme.style("dim"))
    return fill([line, below], width, height, theme)


def graph(columns: Sequence[Column | None], width: int, height: int, scale: Scale, theme: Theme) -> list[Line]:
    """Draw a memory graph; in a single row without the peak's line, which would hide it. Tall rows have a gap above."""
    peak = scale.peak if height > 2 else 0
    gap = [Line(" " * width, theme.base)] if height > 2 else []
    lines = memory_graph(columns, width - 2, height - len(gap), Scale(scale.top, peak), theme)
    return [*gap, *(line.pad(width, theme.base) for line in lines)]


def row_figures(view: RankView, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw allocated, peak, and reserved (resident) memory in GiB; below them the peak's share of the device."""
    line = Line(f"{_size(view.allocated):>6}", theme.base)
    line.add(f"{_size(view.peak):>7}", theme.style("peak")).add(f"{_size(view.behind):>7}", theme.style("dim"))
    share = f"{view.share * 100:>11.0f} %" if view.capacity else ""
    return fill([line, Line(share, theme.style("dim"))], width, height, theme)


def _size(count: int) -> str:
    return gib(count) if count else "-"


def last(view: RankView, width: int, height: int, theme: Theme) -> list[Line]:
    """Draw the phase shares, and the device's health below or beside them; for a rank in trouble its text."""
    trouble = Line(theme.cut(view.text, width - 1), theme.style(theme.state(view.state)[1]))
    in_trouble = view.in_trouble and bool(view.text)
    if height > 1:
        bar = phase_bar(view.shares, width - 1, theme)
        health = trouble if in_trouble else Line(health_words(view, width - 1, theme), theme.style("dim"))
        return fill([bar, health], width, height, theme)
    if in_trouble:
        return fill([trouble], width, height, theme)
    tail = Line()
    if width >= 30 and view.utilization is not None and view.temperature is not None:
        tail.add(f" {view.utilization:>3.0f} % {view.temperature:>3.0f} {theme.glyphs.degree} ", theme.style("dim"))
    bar = phase_bar(view.shares, width - tail.width - 1, theme).add(" ", theme.base)
    return fill([bar.join(tail)], width, 1, theme)


def fill(lines: list[Line], width: int, height: int, theme: Theme) -> list[Line]:
    """Extend a row's part to ``height`` lines, with the text at the bottom, beside the graph's bottom."""
    shown = lines[:height]
    blank = [Line() for _ in range(height - len(shown))]
    return [line.fit(width, theme.base) for line in [*blank, *shown]]


def heading(widths: Parts, view: RankView | None, theme: Theme) -> list[Line]:
    """Draw the column heads of each part."""
    solid, behind = view.words if view else ("alloc", "rsvd")
    behind = {"resident": "rss"}.get(behind, behind)
    style = theme.style("dim")
    title = Line("memory" if widths.graph >= len("memory  GiB: ") else "", style)
    return [
        Line("rank state", style).fit(widths.label, theme.base),
        spread(title, Line("GiB: ", style) if title.width else Line(), widths.graph, theme.base),
        Line(f"{solid:>6}{'peak':>7}{behind:>7}", style).fit(widths.figures, theme.base),
        Line("shares of a step", style).fit(widths.phases, theme.base),
    ]


CARD_WIDTH, CARD_HEIGHT = 36, FIXED_LINES + 2

_RATIO = 6.0


class Plan(NamedTuple):
    """Layout of ranks: ``columns`` cards or rows side by side."""

    mode: Literal["cards", "rows", "heat", "empty"]
    columns: int = 1
    rows: int = 1  # rows of cards, or lines of ranks, that fit at once
    card_height: int = 0  # lines of a card, or of one rank's row


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
        lines = max(1, height // CARD_HEIGHT)
        return Plan("cards", max(1, min(4, width // CARD_WIDTH)), lines, max(CARD_HEIGHT, height // lines))
    return best[1] if best else None


def grid_plan(ranks: int, width: int, height: int, view: str = "auto") -> Plan:
    """Return the layout of ``ranks`` ranks in ``width`` x ``height`` cells."""
    if ranks == 0:
        return Plan("empty")
    row_columns = max(1, min(width // NARROWEST, -(-ranks // max(1, height - 1))))
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


class RankGrid(Canvas):
    """The area of all ranks."""

    def __init__(self, app_state: AppState) -> None:
        super().__init__(app_state, name="fleet")
        self.plan = Plan("empty")
        self.first = 0  # the first row of cards, or first rank of rows, in view
        self._views: list[RankView] = []
        self._graphs: dict[int, list[Column | None]] = {}  # columns of the graphs in view, by rank
        self._across = 1  # cells of a row of the heat map

    def key(self) -> object:
        """Return all that is drawn: graphs are expensive, and of a run at rest they stay the same."""
        app_state, (width, height) = self.app_state, self.size
        app_state.select_valid()
        self._views = rank_views(app_state.model)
        self.plan = grid_plan(len(self._views), width, height, app_state.view)
        self._scroll()
        self._graphs = {view.rank: self._columns(view, graph_width) for view, graph_width in self._in_view(width)}
        if self.plan.mode == "empty":
            return None
        scale = app_state.zoom, app_state.run_peak
        return self._views, self._graphs, self.plan, self.first, app_state.selected, scale

    def draw(self, width: int, height: int) -> list[Line]:
        draw = {
            "cards": self._draw_cards,
            "rows": self._draw_rows,
            "heat": self._draw_heat,
            "empty": self._draw_waiting,
        }
        return draw[self.plan.mode](width, height)

    def _in_view(self, width: int) -> list[tuple[RankView, int]]:
        """Return the ranks in view that have a graph, each with the graph's width."""
        mode, columns, rows, _ = self.plan
        widths = [end - begin for begin, end in pairwise(self._edges(width))]
        if mode == "cards":
            views = self._views[self.first * columns : (self.first + rows) * columns]
            return [(view, widths[place % columns] - 2) for place, view in enumerate(views)]
        if mode == "rows":
            views = self._views[self.first : self.first + rows * columns]
            return [(view, row_parts(widths[place // rows]).graph - 2) for place, view in enumerate(views)]
        return []

    def _columns(self, view: RankView, width: int) -> list[Column | None]:
        model = self.app_state.model
        return columns_of(model.ranks[view.rank], width, model.now, self.app_state.span)

    def _scale(self, view: RankView) -> Scale:
        return scale_of(view, self.app_state.zoom, self.app_state.run_peak)

    def _edges(self, width: int) -> list[int]:
        columns = self.plan.columns
        return [width * column // columns for column in range(columns + 1)]

    def _draw_cards(self, width: int, height: int) -> list[Line]:
        columns, tall = self.plan.columns, self.plan.card_height
        widths = [end - begin for begin, end in pairwise(self._edges(width))]
        lines: list[Line] = []
        # All cards have equal heights, so that their graphs are comparable; spare lines stay empty.
        for row in range(self.first, self.first + self.plan.rows):
            views = self._views[row * columns : (row + 1) * columns]
            lines += _beside([self._card(view, each, tall) for view, each in zip(views, widths, strict=False)])
        return lines

    def _card(self, view: RankView, width: int, height: int) -> list[Line]:
        chosen = self.app_state.selected == view.rank
        return card(view, self._graphs[view.rank], width, height, self._scale(view), self.theme, chosen)

    def _draw_rows(self, width: int, height: int) -> list[Line]:
        blocks: list[list[Line]] = []
        for column, (begin, end) in enumerate(pairwise(self._edges(width))):
            first, widths = self.first + column * self.plan.rows, row_parts(end - begin)
            views = self._views[first : first + self.plan.rows]
            lines = _beside([[head] for head in heading(widths, views[0] if views else None, self.theme)])
            for view in views:
                lines += _beside(self._row(view, widths))
            lines += [Line(" " * (end - begin), self.theme.base)] * (height - len(lines))
            blocks.append(lines)
        return _beside(blocks)

    def _row(self, view: RankView, widths: Parts) -> list[list[Line]]:
        theme, height = self.theme, self.plan.card_height
        return [
            label(view, widths.label, height, theme, view.rank == self.app_state.selected),
            graph(self._graphs[view.rank], widths.graph, height, self._scale(view), theme),
            row_figures(view, widths.figures, height, theme),
            last(view, widths.phases, height, theme),
        ]

    def _draw_heat(self, width: int, height: int) -> list[Line]:
        """Draw the map, scrolled so that the selection is in view, the selected rank's figures, and the legend."""
        grid = plan(len(self._views), width, height - 1)
        self._across, index = grid.columns, self._index()
        shown = max(1, (height - 1) // grid.height)
        first = max(0, min(index // grid.columns - shown // 2, grid.rows(len(self._views)) - shown))
        lines = heat_map(self._views, grid, first, height - 1, index, self.theme)
        lines += [Line()] * (height - 1 - len(lines))
        return [*lines, chosen_line(self._views[index], width, self.theme)]

    def _draw_waiting(self, width: int, height: int) -> list[Line]:
        """Draw a note before the first rank, and the run's output meanwhile."""
        theme, model = self.theme, self.app_state.model
        words = "the run ended before any rank reported" if model.ended else "waiting for the first rank"
        entries = model.logs.select(limit=max(0, height - 4))
        tone = theme.style("warning" if model.ended else "dim")
        head = Line(f" {theme.glyphs.states['starting']} {words}", tone)
        return [Line(), head, Line(), *(log_line(entry, width, theme) for entry in entries)]

    def on_click(self, event: Click) -> None:
        """Select the rank of a card."""
        if self.plan.mode == "cards":
            column = bisect_right(self._edges(self.size.width), event.x) - 1
            index = (self.first + event.y // self.plan.card_height) * self.plan.columns + column
            if index < len(self._views):
                self.app_state.select(self._views[index].rank)

    def _index(self) -> int:
        return next((i for i, view in enumerate(self._views) if view.rank == self.app_state.selected), 0)

    def _scroll(self) -> None:
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
        if not self._views:
            return
        across, down = (self.plan.rows, 1) if self.plan.mode == "rows" else (1, self.plan.columns)
        down = self._across if self.plan.mode == "heat" else down
        index = self._index() + dx * across + dy * down
        if 0 <= index < len(self._views):
            self.app_state.select(self._views[index].rank)
            self.tick()


def _beside(blocks: Sequence[Sequence[Line]]) -> list[Line]:
    """Return blocks of lines side by side."""
    rows: list[Line] = []
    for parts in zip(*blocks, strict=True):
        rows.append(Line())
        for part in parts:
            rows[-1].join(part)
    return rows
