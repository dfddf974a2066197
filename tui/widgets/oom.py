"""The parts of the out-of-memory screen: head with its views, scrolling report, console output."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from rich.cells import chop_cells
from rich.style import Style
from textual.events import Key, Paste
from textual.message import Message

from ...protocol.analysis.oom.words import shape_words
from ...protocol.code_owner import library_of
from ...protocol.messages.memory import PARTS, RankMoment, Remedy
from ...protocol.messages.telemetry import Oom
from ...protocol.text import duration, gib, sanitize
from ..model.oom import CaseKey, ConsoleSession, OomCase, group_parts, is_complete, numbers, split_frame
from ..model.peaks import Answer, Change, WhatIf
from ..model.run import RunModel, held_since, hold_words
from ..model.waterfall import CPU_LABELS, LABELS
from .base import Canvas, scroll_marked
from .drawing import Line, Theme, cut, ruled, spread, tail, width_of, wrap
from .header import time_of_day
from .memory import PART_FILLS
from .state import AppState


class ConsoleInput(Canvas, can_focus=True):
    """Edits one piece of code. Enter posts ``Entered`` once the code is complete; escape posts ``Left``."""

    @dataclass
    class Entered(Message):
        """Code is to be run."""

        code: str

    class Left(Message):
        """Escape was pressed."""

    @dataclass
    class Scrolled(Message):
        """A page key was pressed."""

        direction: int

    def __init__(self, app_state: AppState, name: str) -> None:
        super().__init__(app_state, name=name)
        self.session: ConsoleSession | None = None
        self.before = ""  # earlier lines of incomplete code; each ends with a newline
        self.text = ""
        self.cursor = 0

    def draw(self, width: int, height: int) -> list[Line]:
        theme = self.theme
        line = Line(" ... " if self.before else " >>> ", theme.style("accent", bold=True))
        room = max(4, width - line.width - 1)
        before = tail(self.text[: self.cursor], room - 2)
        after = cut(self.text[self.cursor : self.cursor + room], room - width_of(before), "")
        line.add(before, theme.base)
        if self.has_focus:
            line.add(after[:1] or " ", theme.style("background", "accent", reverse=not theme.color))
            line.add(after[1:], theme.base)
        else:
            line.add(after, theme.base)
            if not self.text:
                line.add("enter: type", theme.style("faint"))
        return [line]

    def on_key(self, event: Key) -> None:
        if event.key == "enter":
            self._enter()
        elif event.key == "escape":
            self.post_message(self.Left())
        elif event.key in ("up", "down") and self.session is not None:
            self._put(self.session.recall(-1 if event.key == "up" else 1, self.before + self.text))
        elif event.key in ("pageup", "pagedown"):
            self.post_message(self.Scrolled(-1 if event.key == "pageup" else 1))
        elif not self._edit(event):
            return
        event.stop()
        event.prevent_default()
        self.tick()

    def on_paste(self, event: Paste) -> None:
        """Insert pasted text; its whole lines become lines of the code."""
        event.stop()
        code = self.before + self.text[: self.cursor] + event.text.replace("\r\n", "\n").replace("\r", "\n")
        self._put("".join(each for each in code if each == "\n" or each.isprintable()) + self.text[self.cursor :])
        self.tick()

    def _put(self, code: str) -> None:
        before, newline, self.text = code.rpartition("\n")
        self.before = before + newline
        self.cursor = len(self.text)

    def _edit(self, event: Key) -> bool:
        text, at = self.text, self.cursor
        match event.key:
            case "left" | "ctrl+b":
                self.cursor = max(0, at - 1)
            case "right" | "ctrl+f":
                self.cursor = min(len(text), at + 1)
            case "home" | "ctrl+a":
                self.cursor = 0
            case "end" | "ctrl+e":
                self.cursor = len(text)
            case "backspace" | "ctrl+h" if at:
                self.text, self.cursor = text[: at - 1] + text[at:], at - 1
            case "backspace" | "ctrl+h" if self.before:
                self._put(self.before[:-1] + text)
                self.cursor = len(self.text) - len(text)
            case "backspace" | "ctrl+h":
                pass
            case "delete" | "ctrl+d":
                self.text = text[:at] + text[at + 1 :]
            case "ctrl+u":
                self.text, self.cursor = text[at:], 0
            case "ctrl+k":
                self.text = text[:at]
            case "ctrl+w":
                kept = text[:at].rstrip().rpartition(" ")
                self.text, self.cursor = kept[0] + kept[1] + text[at:], len(kept[0] + kept[1])
            case "tab":
                self.text, self.cursor = text[:at] + "    " + text[at:], at + 4
            case _ if event.is_printable and event.character:
                self.text = text[:at] + event.character + text[at:]
                self.cursor = at + len(event.character)
            case _:
                return False
        return True

    def _enter(self) -> None:
        code = self.before + self.text
        if not code.strip():
            self._put("")
        # As in Python's own console, an empty line ends a block.
        elif is_complete(code) or (self.before and not self.text.strip()):
            self._put("")
            self.post_message(self.Entered(code.rstrip("\n")))
        else:
            self._put(code + "\n")


_NAME = 24
_MOST_WIDE = 118


def what_if_lines(found: WhatIf, width: int, theme: Theme) -> list[Line]:
    """Draw the progress or results of the dry runs; empty before their request."""
    if found.state == "none":
        return []
    lines = [Line(), Line(" what if: verified by dry runs of this job", theme.style("accent", bold=True))]
    if found.state == "running":
        now = found.done[-1] if found.done else "starting"
        count = f", {len(found.done) - 1} done" if len(found.done) > 1 else ""
        since = duration(time.monotonic() - found.since)
        words = f"  {theme.glyphs.states['starting']} {now}{count}, {since}   w: cancel"
        return [*lines, Line(theme.cut(words, width), theme.base)]
    if found.state == "done" and found.answer is not None:
        return [*lines, *_table(found.answer, width, theme)]
    if found.state == "cancelled":
        return [*lines, *_sentences(["cancelled   w: again"], width, theme, "dim")]
    return [*lines, *_sentences([f"no prediction: {found.text}"], width, theme, "warning")]


def _table(answer: Answer, width: int, theme: Theme) -> list[Line]:
    dim = theme.style("dim")
    lines = [Line(f"  {'':<{_NAME}}{'fits':>5}{'needs':>12}{'GPU time':>10}  set", dim)]
    base = max(answer.points, key=lambda point: point.sequence_length, default=None)
    if base is not None:
        length = f"as it is, {base.sequence_length:,} tokens"
        lines.append(_row(length, base.fits, base.needed_bytes, 1.0, "", width, theme))
    lines += [_change(one, width, theme) for one in answer.what_if]
    fits = sum(one.fits for one in answer.what_if)
    capacity = f" of the {gib(answer.capacity_bytes)} that PyTorch could have" if answer.capacity_bytes else ""
    if base is not None and base.fits:
        text = f"the job as it is should have fitted{capacity}: something else took memory, or fragments it"
    elif not fits:
        text = "none of them fits" + capacity
    else:
        text = "the cheapest that fits first" + capacity
    tone = "dim" if fits and not (base is not None and base.fits) else "warning"
    return lines + _sentences([text], width, theme, tone)


def _change(one: Change, width: int, theme: Theme) -> Line:
    name = sanitize(one.name, 60)
    if one.refused:
        line = Line(f"  {theme.cut(name, _NAME - 1):<{_NAME}}", theme.style("dim"))
        return line.add(theme.cut(sanitize(one.refused, 300), width - line.width - 1), theme.style("dim"))
    return _row(name, one.fits, one.needed_bytes, one.slower, sanitize(one.change, 300), width, theme)


def _row(name: str, fits: bool | None, needs: int, slower: float, change: str, width: int, theme: Theme) -> Line:
    line = Line(f"  {theme.cut(name, _NAME - 1):<{_NAME}}", theme.style("text", bold=bool(fits)))
    line.add(f"{'yes' if fits else 'no':>5}", theme.style("good" if fits else "error", bold=bool(fits)))
    line.add(f"{gib(needs):>12}{f'x {slower:.2f}' if slower else '-':>10}  ", theme.base)
    return line.add(theme.cut(change, width - line.width - 1), theme.style("dim"))


_FRAMES, _HOLDERS = 16, 8
_TWO_COLUMNS = 150  # minimum width for the evidence beside the verdict
_WIDE = 100  # minimum width for a rank's reserved memory beside its collective


def report_lines(
    case: OomCase, model: RunModel, place: str, acts: bool, width: int, theme: Theme, what_if: WhatIf | None = None
) -> list[Line]:
    """Draw a report; in a wide terminal in two columns, the verdict and its evidence.

    ``place``: of its snapshot, in words. ``acts``: whether commands to the rank are possible.
    """
    two = width >= _TWO_COLUMNS
    room = (width - 3) // 2 if two else width
    left = _meaning(case, model, acts, what_if or WhatIf(), room, theme)
    left += _section("the numbers at that moment", _number_rows(case.oom, room, theme), theme)
    if not two:
        return [*left, *_rest(case, place, width, theme)]
    right = _rest(case, place, width - room - 3, theme)[1:]
    bar = Line(f" {theme.glyphs.bar} ", theme.style("rule"))
    pairs = zip_longest(left, right)
    return [(one or Line()).fit(room, theme.base).join(bar).join(other or Line()) for one, other in pairs]


def _meaning(case: OomCase, model: RunModel, acts: bool, asked: WhatIf, width: int, theme: Theme) -> list[Line]:
    lines = [Line(" " + row, theme.base) for row in wrap(case.verdict.text, min(width, _MOST_WIDE) - 2)]
    sure = "certain from the figures" if case.verdict.sure else "most likely from the figures"
    lines.append(Line(f" {sure}", theme.style("dim")))
    if held := hold_words(model, case):
        lines += [Line(), _head(f"{theme.glyphs.states['held']} held", theme, "error")]
        lines += _sentences(held, width, theme)
        if acts:
            console = "c: a console in that frame   " if case.oom.console else ""
            lines.append(Line(f"  {console}r: release it   k: kill", theme.style("accent")))
    lines += what_if_lines(asked, width, theme)
    return lines + _section("what to try, in this order", _remedy_sentences(case.remedies, width, theme), theme)


def _rest(case: OomCase, place: str, width: int, theme: Theme) -> list[Line]:
    oom, lines = case.oom, list[Line]()
    if oom.parts:
        lines += _section("allocated was", _parts(oom, width, theme), theme)
        lines += _sentences([oom.parts_note], width, theme, "dim") if oom.parts_note else []
    if oom.batch_shape:
        lines += _section("batch", [_batch(oom, theme)], theme)
    if oom.holders:
        lines += _section("who held most", _holders(oom, width, theme), theme)
    if case.ranks:
        lines += _section("all ranks at that moment", _ranks(case, width, theme), theme)
    if oom.stack:
        of = " (of the training thread)" if oom.stack_of == "training" else ""
        lines += _section(f"where it failed{of}, innermost first", _stack(oom, width, theme), theme)
    lines += _section("snapshot", _sentences([place], width, theme), theme)
    if oom.snapshot_note:
        lines += _sentences([oom.snapshot_note], width, theme, "dim")
    return lines


def _sentences(texts: list[str], width: int, theme: Theme, tone: str = "text") -> list[Line]:
    rows = [row for text in texts for row in wrap(text, min(width, _MOST_WIDE) - 3)]
    return [Line("  " + row, theme.style(tone)) for row in rows]


def _head(text: str, theme: Theme, tone: str = "accent") -> Line:
    return Line(f" {text}", theme.style(tone, bold=True))


def _section(title: str, rows: Iterable[Line], theme: Theme) -> list[Line]:
    return [Line(), _head(title, theme), *rows]


def _remedy_sentences(remedies: list[Remedy], width: int, theme: Theme) -> Iterator[Line]:
    if not remedies:
        yield Line("  no remedy follows from the figures", theme.style("dim"))
    for number, remedy in enumerate(remedies, 1):
        frees = f"{remedy.bound + ' ' if remedy.bound else ''}{gib(remedy.frees_bytes)}" if remedy.frees_bytes else ""
        for index, row in enumerate(wrap(remedy.text, min(width, _MOST_WIDE) - 5)):
            yield Line("    " if index else f"  {number} ", theme.style("accent", bold=True)).add(row, theme.base)
        if not remedy.setting and not frees:
            continue
        line = Line("    ", theme.base)
        if frees:
            line.add(f"frees {frees}", theme.style("good", bold=True)).add("   " if remedy.setting else "", theme.base)
        line.add(theme.cut(sanitize(remedy.setting), width - line.width - 1), theme.style("dim"))
        yield line


def _number_rows(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    for index, (name, size, remark) in enumerate(numbers(oom)):
        line = Line(f"  {name:<24}", theme.style("dim"))
        line.add(f"{gib(size):>12}", theme.style("error" if index == 0 else "text", bold=index == 0))
        yield line.add(theme.cut(f"  {sanitize(remark)}", width - line.width), theme.style("dim"))


def _parts(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    total = max(1, sum(oom.parts.values()))
    largest = max(1, *oom.parts.values())
    labels = LABELS | (CPU_LABELS if oom.measure != "cuda" else {})
    names = [name for name in PARTS if oom.parts.get(name)] + sorted(set(oom.parts) - set(PARTS))
    room = max(8, min(width, _MOST_WIDE) - 50)
    for name in names:
        size = oom.parts[name]
        line = Line(f"  {sanitize(labels.get(name, name))[:22]:<22}", theme.style("dim"))
        line.add(f"{gib(size):>12} {size / total * 100:>4.0f} %  ", theme.base)
        cells = max(1, round(size / largest * room)) if size > 0 else 0
        fill = PART_FILLS.get(name, "#") if theme.plain_graphs else " "
        yield line.add(fill * cells, theme.style("on_color", theme.part(name)))


def _batch(oom: Oom, theme: Theme) -> Line:
    line = Line(f"  {shape_words(oom.batch_shape)}", theme.style("text", bold=True))
    if oom.micro_step:
        line.add(f", micro-step {oom.micro_step}", theme.base)
    if not oom.largest_shape:
        return line.add("; there was none before in this process", theme.style("dim"))
    step = f" in step {oom.largest_shape_step:,}" if oom.largest_shape_step else ""
    return line.add(f"; the largest before was {shape_words(oom.largest_shape)}{step}", theme.style("dim"))


def _holders(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    for group in oom.holders[:_HOLDERS]:
        blocks = f"{group.count:>6,} " + ("block " if group.count == 1 else "blocks")
        line = Line(f"  {gib(group.bytes):>12}", theme.style("text", bold=True)).add(f" {blocks}  ", theme.style("dim"))
        inner, own = (place.replace("  ", " ") for place in group_parts(group))
        place = f"{inner} (from {own})" if own else inner if group.frames else "no Python stack recorded"
        yield line.add(theme.cut(place, width - line.width - 1), theme.base)


def _ranks(case: OomCase, width: int, theme: Theme) -> Iterator[Line]:
    reserved = f"{'reserved':>11}" if width >= _WIDE else ""
    head = f"  {'rank':<6}{'state':<13}{'step':>8}  {'phase':<11}{'allocated':>11}{reserved}{'batch':>11}"
    yield Line(cut(head, width, ""), theme.style("dim"))
    for moment in case.ranks:
        yield _rank(moment, moment.rank == case.oom.rank, width, theme)


def _rank(moment: RankMoment, failed: bool, width: int, theme: Theme) -> Line:
    glyph, tone = theme.state(moment.state)
    line = Line(f"{theme.glyphs.error if failed else ' '} {moment.rank:<6}", theme.style("error" if failed else "text"))
    line.add(f"{glyph} ", theme.style(tone)).add(f"{sanitize(moment.state)[:10]:<11}", theme.base)
    line.add(f"{moment.step:>8,}  {sanitize(moment.phase)[:10]:<11}", theme.base)
    reserved = f"{gib(moment.reserved_bytes):>11}" if width >= _WIDE else ""
    line.add(f"{gib(moment.allocated_bytes):>11}{reserved}", theme.base)
    line.add(f"{shape_words(moment.batch_shape):>11}", theme.style("dim"))
    if moment.collective:
        words = f"  in {sanitize(moment.collective)}"
        line.add(theme.cut(words, width - line.width), theme.style("warning"))
    return line


def _stack(oom: Oom, width: int, theme: Theme) -> Iterator[Line]:
    frames = [split_frame(frame) for frame in reversed(oom.stack)]
    for filename, number, name in frames[:_FRAMES]:
        own = bool(filename) and not library_of(filename)
        line = Line(f"  {name}", theme.style("text" if own else "dim", bold=own))
        room = width - line.width - 3
        where = f"{filename}:{number}" if filename else ""
        if len(where) > room > 1:
            where = theme.glyphs.ellipsis + where[-(room - 1) :]
        yield line.add(f"  {where}", theme.style("dim"))
    if len(frames) > _FRAMES:
        yield Line(f"  and {len(frames) - _FRAMES} more", theme.style("faint"))


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
    acts = False

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
        return scroll_marked(shown, self.top, len(lines), height, theme) if len(lines) > height else shown

    def scroll(self, lines: int) -> None:
        self.top = max(0, self.top + lines)
        self.tick(force=True)


class ConsoleOutput(OomCanvas):
    """The console's input and output, the newest at the bottom."""

    session: ConsoleSession | None = None
    refusal = ""  # reason why there is no console; empty if there is one
    back = 0

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
                words = f"running, {duration(max(0.0, self.app_state.model.now - since))}"
                lines.append(Line(f" {theme.glyphs.states['starting']} {words}", theme.style("dim")))
        if self.refusal:
            lines += [Line(), *_broken(f" {self.refusal}", width - 1, theme.style("warning"))]
        self.back = max(0, min(self.back, len(lines) - height))
        end = len(lines) - self.back
        return lines[max(0, end - height) : end]

    def scroll(self, lines: int) -> None:
        self.back = max(0, self.back - lines)
        self.tick(force=True)


def _broken(text: str, width: int, style: Style) -> list[Line]:
    return [Line(row, style) for row in chop_cells(text, width)]
