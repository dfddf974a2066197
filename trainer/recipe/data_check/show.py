"""Renders the report as text: sentences, a histogram, and tokens coloured if they carry loss."""

from itertools import groupby
from typing import Any

import plotext

from .check import Collected, Facts, Finding, Sample

_SHOWN = 3  # records listed with each finding
_TICKS = 5  # spaces between the numbers of the histogram's axis
_MOST_TOKENS = 400  # tokens shown of a document
_TRAINED, _CONTEXT, _DIM, _WRONG, _GOOD, _END = (f"\033[{code}m" for code in ("30;42", "36", "2", "1;31", "1;32", "0"))


class Painter:
    """Writes text with or without colour."""

    def __init__(self, colour: bool, ascii_only: bool, width: int) -> None:
        self.colour = colour
        self.width = width
        self.open, self.close, self.line_end = ("[[", "]]", "\\n") if ascii_only else ("⟦", "⟧", "↵")
        self.ascii_only = ascii_only

    def paint(self, style: str, text: str) -> str:
        """Return text in a style; unchanged without colour."""
        if not self.colour:
            return text
        return "\n".join(f"{style}{line}{_END}" if line else line for line in text.split("\n"))


def render(collected: Collected, findings: list[Finding], painter: Painter, pad_to: int) -> str:
    """Return the whole report as text."""
    facts = collected.facts
    parts = [_summary(facts, painter)]
    if collected.lengths and facts.lengths is not None:
        parts.append(_histogram(collected.lengths, painter))
    if collected.samples:
        legend = painter.paint(_TRAINED, f"{painter.open}trained{painter.close}")
        parts.append(f"{legend}  {painter.paint(_CONTEXT, 'context')}  {painter.paint(_DIM, 'padding')}")
        parts += [_sample(sample, collected.tokenizer, painter, pad_to) for sample in collected.samples]
    parts.append(_findings(findings, painter))
    return "\n\n".join(parts) + "\n"


def _summary(facts: Facts, painter: Painter) -> str:
    report = facts.report
    lines = [
        f"{_of(report.read, 'record')} ({', '.join(sorted(set(facts.formats)))}), {report.refused.count:,} refused"
    ]
    if facts.template:
        lines.append(f"chat template: {facts.template}")
    if facts.documents:
        share = facts.label_tokens / max(1, facts.tokens)
        lines.append(
            f"an epoch: {_of(facts.rows, 'sequence')}, {facts.tokens:,} tokens, {facts.label_tokens:,} trained "
            f"({share:.0%}), {facts.padding:,} padding; {facts.efficiency:.1%} of the positions are used"
        )
        lines.append(f"ends of turns: {facts.ends_learned:,} of {facts.turns:,} learned")
    if facts.bos_counts:
        counts = ", ".join(f"{n} in {_of(count, 'document')}" for n, count in sorted(facts.bos_counts.items()))
        lines.append(f"BOS tokens ({facts.bos}): {counts}")
    if facts.lengths is not None:
        found = facts.lengths
        lines.append(
            f"tokens a record: shortest {found.shortest:,}, median {found.median:,}, 90 % {found.p90:,}, "
            f"99 % {found.p99:,}, longest {found.longest:,}"
        )
    return "\n".join(lines)


def _of(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _histogram(lengths: list[int], painter: Painter) -> str:
    plot: Any = plotext
    plot.terminal.limit(False, False)
    figure = plot.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(min(painter.width, 100), 12)
    bins = min(40, max(5, len(set(lengths))))
    figure.draw(figure.hist(lengths, bins, marker="#" if painter.ascii_only else "full"))
    figure.title("records by tokens")
    # Without limits the axis begins half a bar below the shortest.
    first, last = min(lengths), max(lengths)
    figure.ruler("x").lim(first, max(last, first + 1))
    ticks = sorted({first + (last - first) * part // _TICKS for part in range(_TICKS + 1)})
    figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
    text = figure.build().string(True)
    if painter.ascii_only:
        text = "".join(letter if ord(letter) < 128 else "+" for letter in text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _sample(sample: Sample, tokenizer: Any, painter: Painter, pad_to: int) -> str:
    parts: list[str] = []
    shown = min(len(sample.ids), _MOST_TOKENS)
    tokens = zip(sample.learned[:shown], sample.ids[:shown], strict=True)
    for learned, run in groupby(tokens, key=lambda pair: pair[0]):
        text = _plain(tokenizer.decode([token for _, token in run]), painter)
        if learned:
            parts.append(painter.paint(_TRAINED, f"{painter.open}{text}{painter.close}"))
        else:
            parts.append(painter.paint(_CONTEXT, text))
    behind = [f"{len(sample.ids) - shown:,} more tokens"] if len(sample.ids) > shown else []
    behind += [f"{sample.cut:,} tokens cut away"] if sample.cut else []
    padding = -len(sample.ids) % 8 if not pad_to else pad_to - len(sample.ids)
    behind += [f"{padding:,} padding"] if padding > 0 and not pad_to else []
    tail = painter.paint(_DIM, f" ({', '.join(behind)})") if behind else ""
    return f"{painter.paint(_DIM, _plain(sample.place, painter))}\n{''.join(parts)}{tail}"


def _plain(text: str, painter: Painter) -> str:
    """Return text without characters that a terminal would execute."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)
    if painter.ascii_only:
        shown = shown.encode("ascii", "backslashreplace").decode()
    return shown.replace("\n", f"{painter.line_end}\n")


def _findings(findings: list[Finding], painter: Painter) -> str:
    if not findings:
        return painter.paint(_GOOD, "nothing found")
    lines: list[str] = []
    for finding in findings:
        text = f"{finding.count:,} {_numbered(finding)}" if finding.kind != "unusable" else finding.text
        lines.append(
            painter.paint(_WRONG, _plain(text, painter)) + _plain(f"; {finding.fix}  ({finding.kind})", painter)
        )
        lines += [_plain(f"    {place}: {detail}", painter) for place, detail in finding.first[:_SHOWN]]
        if finding.count > _SHOWN and finding.first:
            lines.append(f"    and {finding.count - _SHOWN:,} more")
    return "\n".join(lines)


def _numbered(finding: Finding) -> str:
    """Return a finding's sentence in the singular where it counts one."""
    if finding.count != 1:
        return finding.text
    noun, verb, rest = finding.text.split(" ", 2)
    verb = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{noun.removesuffix('s')} {verb} {rest}"
