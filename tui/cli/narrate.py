"""What happens in a run, told as plain lines: the same of a live run and of its replay."""

import time
from collections.abc import Iterator

from ...protocol.control import Alert
from ...protocol.text import duration, gib, sanitize
from ..model.run import RunModel

PROGRESS_SECONDS = 2.0
"""A progress line at most this often, by the run's own clock, so that a replay prints what the live run did."""

_MARKS = {"info": ("·", "-"), "warning": ("▲", "!"), "error": ("✖", "X")}


class Narrator:
    """Tells a run: ask it what is new after frames were folded into the model."""

    def __init__(self, *, ascii_only: bool = False, with_output: bool = False) -> None:
        """Tell a run from its beginning.

        Args:
            ascii_only: use ASCII characters only.
            with_output: tell what the ranks print too.
        """
        self._ascii = ascii_only
        self.with_output = with_output
        self._step = 0
        self._step_at = float("-inf")
        self._introduced = False
        self._state = "starting"
        self._alerts: dict[int, bool] = {}
        self._alerts_version = 0
        self._logs_version = 0
        self._log_seq = 0

    def tell(self, model: RunModel) -> Iterator[str]:
        """Yield the lines, mostly none, that say what is new in ``model`` since the last call."""
        for text in self._news(model):
            yield text.encode("ascii", "replace").decode() if self._ascii else text

    def _news(self, model: RunModel) -> Iterator[str]:
        if not self._introduced and _all_are_known(model):
            self._introduced = True
            yield _at(model.now, _introduction(model))
        if self.with_output:
            yield from self._output(model)
        if model.step > self._step and (self._is_due(model) or model.ended):
            self._step, self._step_at = model.step, model.now
            yield _at(model.now, _progress(model))
        if model.alerts.version != self._alerts_version:
            self._alerts_version = model.alerts.version
            for alert in model.alerts:
                yield from self._alert(alert)
        if model.state != self._state:
            self._state = model.state
            if model.ended or model.state == "stopping":
                why = f": {sanitize(model.state_text)}" if model.state_text else ""
                yield _at(model.state_time or model.now, f"{model.state}{why}")

    def _is_due(self, model: RunModel) -> bool:
        late = model.now - self._step_at >= PROGRESS_SECONDS
        return late or model.step == model.total_steps

    def _output(self, model: RunModel) -> Iterator[str]:
        if model.logs.version == self._logs_version:
            return
        # A model that was made anew after a late join counts its lines anew; numbers of the stream go on.
        news = model.logs.version - (self._logs_version if model.logs.version > self._logs_version else 0)
        self._logs_version = model.logs.version
        for line in model.logs.select(limit=news):
            if line.seq <= self._log_seq:
                continue
            self._log_seq = line.seq
            source = "launcher" if line.rank < 0 else f"rank {line.rank}"
            yield f"{source}| {sanitize(line.text)}"

    def _alert(self, alert: Alert) -> Iterator[str]:
        resolved = alert.resolved is not None
        known = self._alerts.get(alert.id)
        self._alerts[alert.id] = resolved
        if known is None:
            mark = _MARKS[alert.severity][self._ascii]
            yield _at(alert.time, f"{mark} {alert.kind}: {sanitize(alert.title)}")
        if resolved and not known:
            yield _at(alert.resolved or alert.time, f"  over: {sanitize(alert.title)}")


def _all_are_known(model: RunModel) -> bool:
    hellos = [rank.hello for rank in model.ranks.values() if rank.hello]
    if not 0 < model.info.world_size <= len(hellos):
        return False
    # A rank says hello before it has made its model or begun to use its GPU, and again when it has. Until its first
    # step a CPU may be no more than what it has not left yet.
    return model.step > 0 or (bool(model.info.model) and all(hello.device.kind == "cuda" for hello in hellos))


def _introduction(model: RunModel) -> str:
    info = model.info
    hellos = [rank.hello for rank in model.ranks.values() if rank.hello]
    devices = ", ".join(sorted({sanitize(hello.device.name) for hello in hellos}))
    ranks = f"{info.world_size} rank{'s' if info.world_size > 1 else ''} on {devices}"
    zero = f"ZeRO-{info.zero_stage}" if info.zero_stage is not None else ""
    return ", ".join(filter(None, (ranks, sanitize(info.model), zero, info.precision, info.backend)))


def _progress(model: RunModel) -> str:
    total = f"/{model.total_steps}" if model.total_steps else ""
    parts = [f"step {model.step}{total}"]
    if model.loss is not None:
        parts.append(f"loss {model.loss:.4f}")
    rates = model.rates
    if rates.tokens_per_second:
        parts.append(f"{rates.tokens_per_second:,.0f} tok/s")
    if rates.seconds_per_step:
        parts.append(f"{rates.seconds_per_step:.3f} s/step")
    if model.peak is not None:
        parts.append(f"peak {gib(model.peak.bytes)}")
    if model.seconds_left:
        parts.append(f"{duration(model.seconds_left)} left")
    return "  ".join(parts)


def _at(t: float, text: str) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(t))} {text}"
