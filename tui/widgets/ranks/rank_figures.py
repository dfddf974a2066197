"""Draws the figures of one rank: process, batch, loss, memory, device, allocator, and ftmon's own cost."""

from math import prod

from ....protocol.text import sanitize
from ...model.events import allocations
from ...model.rank import RankModel
from ...model.run import RunModel
from ..drawing.figures import count, gib, loss, milliseconds, small
from ..drawing.line import Line
from ..drawing.theme import Theme
from ..state.rank_view import RankView
from .card import health, state_words

Pairs = list[tuple[str, str]]


def figure_lines(model: RunModel, rank: RankModel, view: RankView, width: int, theme: Theme) -> list[Line]:
    """Draw the figures as name and value pairs, as many per line as fit."""
    lines = [_pairs(_process(rank), width, theme)]
    lines.append(_pairs(_training(rank), width, theme))
    lines.append(_pairs(_memory(rank, view), width, theme))
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
    found += [("", stage)] if stage else []
    found += [("", hello.precision)] if hello.precision else []
    found += [("torch", hello.versions["torch"])] if "torch" in hello.versions else []
    found += [("deepspeed", hello.versions["deepspeed"])] if "deepspeed" in hello.versions else []
    return found


def _training(rank: RankModel) -> Pairs:
    last = rank.last
    if last is None:
        return [("step", "none finished yet")]
    found = [("step", f"{last.step:,}")]
    if last.batch_shape:
        batch = f" {'x'} ".join(map(str, last.batch_shape))
        found.append(("batch", f"{batch} x {last.micro_steps}" if last.micro_steps > 1 else batch))
    if last.tokens:
        pads = 1 - last.tokens / last.padded_tokens if last.padded_tokens else 0
        found.append(
            ("tokens", f"{count(last.tokens)}, {pads * 100:.0f} % pads" if pads > 0.005 else count(last.tokens))
        )
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
    found.append(("dropped messages", f"{rank.dropped:,}"))
    events = rank.allocator.last
    if events is not None:
        found.append(("allocator", f"{allocations(events):,} allocations in step {events.step:,}"))
    return found
