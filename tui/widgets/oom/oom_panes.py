"""The parts of the out-of-memory screen: head with its views, scrolling report, console output."""

import time

from rich.cells import chop_cells
from rich.style import Style

from ....protocol.text import duration, sanitize
from ...model.console import ConsoleSession
from ...model.held import held_since
from ...model.oom import CaseKey, OomCase
from ...model.what_if import WhatIf
from ..base.canvas import Canvas
from ..drawing.line import Line, spread
from ..drawing.theme import ruled
from ..lines.scrubber import time_of_day
from .oom_lines import report_lines

VIEWS = ("report", "stacks", "blocks", "segments", "console")


class OomCanvas(Canvas):
    """Base class of a part that shows one error."""

    case_key: CaseKey | None = None

    @property
    def case(self) -> OomCase | None:
        """The visible error; None if it is unknown at the displayed moment."""
        return self.app_state.model.ooms.get(self.case_key)


class OomHead(OomCanvas):
    """The rank of the error, the verdict in one line, and the views."""

    view = "report"

    def key(self) -> object:
        model, case = self.app_state.model, self.case
        held = int(model.now - held_since(model, case)) if case is not None and held_since(model, case) else -1
        return model.ooms.version, id(model.ooms), self.case_key, self.view, held

    def draw(self, width: int, height: int) -> list[Line]:
        theme, case, model = self.theme, self.case, self.app_state.model
        if case is None:
            text = " out of memory: none up to this moment "
            return [Line(theme.glyphs.rule, theme.style("rule")).add(text, theme.style("dim"))]
        oom = case.oom
        where = f", {sanitize(oom.phase, 30)}" if oom.phase else ""
        left = Line(" out of memory ", theme.style("error", bold=True))
        left.add(f"rank {oom.rank}, step {oom.step:,}{where}, {time_of_day(oom.time)} ", theme.style("text", bold=True))
        cases = model.ooms.ordered()
        right = Line()
        if len(cases) > 1:
            number = [one.key for one in cases].index(case.key) + 1
            right.add(f" {number} of {len(cases)} ", theme.style("accent"))
        return [ruled(left, right, width, theme), self._title(case, width), self._views(case, width)]

    def _title(self, case: OomCase, width: int) -> Line:
        theme, model = self.theme, self.app_state.model
        right = Line()
        if since := held_since(model, case):
            words = f" {theme.glyphs.states['held']} held {duration(max(1, int(model.now - since)))} "
            right.add(words, theme.style("on_color", "error", bold=True, reverse=not theme.color))
        left = Line(f" {theme.glyphs.error} ", theme.style("error", bold=True))
        title = theme.cut(sanitize(case.verdict.title), width - left.width - right.width - 1)
        return spread(left.add(title, theme.style("error", bold=True)), right, width, theme.base)

    def _views(self, case: OomCase, width: int) -> Line:
        theme = self.theme
        line = Line(" ", theme.base)
        names = {"stacks": "timeline, stacks", "segments": "segment map"} if width >= 76 else {}
        for number, view in enumerate(VIEWS, 1):
            chosen = view == self.view
            reachable = view == "report" or (case.oom.held if view == "console" else bool(case.oom.snapshot))
            tone = "accent" if chosen else "dim" if reachable else "faint"
            text = f" {number} {names.get(view, view)} "
            line.add(text, theme.style(tone, bold=chosen, reverse=chosen and not theme.color))
        return line


class OomReportView(OomCanvas):
    """The report; it scrolls."""

    top = 0
    place = ""
    """Place of the snapshot, in words."""
    acts = False
    """Whether commands to the rank are possible."""

    def key(self) -> object:
        model, case = self.app_state.model, self.case
        held = int(model.now) if case is not None and held_since(model, case) else 0
        asked = self._what_if
        since = int(time.monotonic() - asked.since) if asked is not None and asked.state == "running" else 0
        dry = (id(asked), asked.version, since) if asked is not None else None
        return model.ooms.version, id(model.ooms), self.case_key, self.top, self.place, self.acts, held, dry

    @property
    def _what_if(self) -> WhatIf | None:
        runs = self.app_state.dry_runs.get(self.case_key) if self.case_key is not None else None
        return runs.found if runs is not None else None

    def draw(self, width: int, height: int) -> list[Line]:
        case, theme = self.case, self.theme
        if case is None:
            return [Line(" the run has no out-of-memory error at this moment", theme.style("dim"))]
        lines = report_lines(case, self.app_state.model, self.place, self.acts, width - 1, theme, self._what_if)
        self.top = max(0, min(self.top, len(lines) - height))
        shown = [line.fit(width - 1, theme.base) for line in lines[self.top : self.top + height]]
        if len(lines) > height:
            size = max(1, height * height // len(lines))
            begin = round(self.top / (len(lines) - height) * (height - size))
            for index, line in enumerate(shown):
                line.add(theme.glyphs.scroll if begin <= index < begin + size else " ", theme.style("faint"))
        return shown

    def scroll(self, lines: int) -> None:
        """Scroll by lines."""
        self.top = max(0, self.top + lines)
        self.tick(force=True)


class ConsoleOutput(OomCanvas):
    """The console's input and output, the newest at the bottom."""

    session: ConsoleSession | None = None
    refusal = ""
    """Reason why there is no console; empty if there is one."""
    back = 0
    """Lines scrolled back from the newest."""

    def key(self) -> object:
        session = self.session
        waiting = int(self.app_state.model.now) if session is not None and session.waiting_since else 0
        return id(session), session.version if session else 0, self.refusal, self.back, waiting

    def draw(self, width: int, height: int) -> list[Line]:
        """Draw the newest lines; long ones are broken."""
        theme, session = self.theme, self.session
        tones = {"in": "accent", "out": "text", "error": "error", "note": "dim"}
        lines: list[Line] = []
        if session is not None:
            head = f"in {session.place}" if session.place else f"in the failing frame of rank {session.rank}"
            words = f"{head}; help() lists what there is; the rank runs what you type, with all it may do"
            lines.append(Line(" " + theme.cut(words, width - 2), theme.style("dim")))
            for one in session.lines[-(height + self.back) :]:
                lines += _broken(" " + one.text, width - 1, theme.style(tones[one.kind]))
            if since := session.waiting_since:
                waited = max(0.0, self.app_state.model.now - since)
                lines.append(
                    Line(f" {theme.glyphs.states['starting']} running, {duration(waited)}", theme.style("dim"))
                )
        if self.refusal:
            lines += [Line(), *_broken(f" {self.refusal}", width - 1, theme.style("warning"))]
        self.back = max(0, min(self.back, len(lines) - height))
        end = len(lines) - self.back
        return lines[max(0, end - height) : end]

    def scroll(self, lines: int) -> None:
        """Scroll back (negative) or forward."""
        self.back = max(0, self.back - lines)
        self.tick(force=True)


def _broken(text: str, width: int, style: Style) -> list[Line]:
    return [Line(row, style) for row in chop_cells(text, width)]
