"""A slow rank: by its own work before collectives, which wall time hides because collectives equalise it.

Own work of a step: on the CPU the host time of data, forward, backward and optimizer without the time inside collective
calls. On a GPU the host time of data (likewise) plus the device time of forward: backward and optimizer run collectives
on the device, where waiting looks like work. A ZeRO-3 forward gathers parameters and is equalised too, so there a slow
rank may go unseen, but none is blamed wrongly.

Rule: over the last 5 steps (the first two of the run left out) a rank's median is compared with the median of the other
ranks' medians. It is slow when that is more than 1.35 times as much (1.75 on the CPU, where ranks share cores with each
other and with everything else on the host), and more by 10 % of its steps and 2 ms, at 4 steps in a row; it is over
when it was below 1.15 times at 5 steps in a row. The alert says at which phase it is slow, and what hinders its GPU
where NVML shows that it is throttled, clocked lower than the others', or shared (``hindered``).
"""

from collections import deque

from ....protocol.control import Alert
from ....protocol.telemetry import DeviceSample, Hello, Step
from ....protocol.text import duration
from .book import AlertBook, Key
from .hindered import Hindered

WINDOW = 5
WARM_UP_STEPS = 2
SLOW_RATIO = 1.35
SLOW_RATIO_CPU = 1.75
FINE_RATIO = 1.15
SLOW_STEPS = 4
FINE_STEPS = 5
EXCESS_SHARE = 0.10
EXCESS_US = 2000
UPDATE_STEPS = 25
PARTS = ("data", "forward", "backward", "optimizer")

_PLACE = {name: index for index, name in enumerate(PARTS)}
_CAUSES = {
    "data": "Its data loading is slow: look at its disk, its dataloader workers, or the size of its samples.",
    "forward": "Its computing is slow: look at its clocks and throttle reasons, other processes on its device or "
    "cores, or longer batches than the others'.",
    "backward": "Its computing is slow: look at its clocks and throttle reasons, or other processes on its device or "
    "cores.",
    "optimizer": "Its optimizer step is slow: look at offload (memory bandwidth, cores) or other processes there.",
}


class _Rank:
    __slots__ = ("cuda", "fine", "host", "own", "parts", "slow", "steps")

    def __init__(self) -> None:
        self.cuda = False
        self.steps = 0
        self.own: deque[int] = deque(maxlen=WINDOW)
        self.host: deque[int] = deque(maxlen=WINDOW)
        """Host time of the last steps, waiting included."""
        self.parts: deque[list[int]] = deque(maxlen=WINDOW)
        self.slow = 0
        """Steps in a row at which it was slow."""
        self.fine = 0
        """Steps in a row at which a standing alert looked over."""


class SlowDetector:
    """Finds a rank that is slow at its own work (rule: this module's docstring). Costs a microsecond or two a step."""

    def __init__(self, book: AlertBook) -> None:
        self._book = book
        self._ranks: dict[int, _Rank] = {}
        self._arrived: dict[int, int] = {}
        self._hindered = Hindered()

    def sample(self, sample: DeviceSample) -> None:
        """Note how a device is: a slow one is slow for a reason."""
        self._hindered.sample(sample)

    def hello(self, hello: Hello) -> None:
        """Learn whether a rank's device times are to be used."""
        self._hindered.hello(hello)
        self._ranks.setdefault(hello.rank, _Rank()).cuda = hello.device.kind == "cuda"

    def drop(self, t: float, rank: int) -> list[Alert]:
        """Forget a rank that ended: the others are no longer compared with it."""
        self.forget(rank)
        return self._book.resolve(t, _key(rank), "The rank ended.")

    def forget(self, rank: int) -> None:
        """Compare with a rank no more, and say nothing."""
        self._ranks.pop(rank, None)
        self._arrived.clear()

    def step(self, t: float, step: Step) -> list[Alert]:
        """Take in one step; judge all ranks once the last of them has brought it."""
        rank = self._ranks.get(step.rank)
        if rank is None:
            rank = self._ranks[step.rank] = _Rank()
        rank.steps += 1
        if len(self._ranks) == 1 or rank.steps <= WARM_UP_STEPS:
            return []
        parts = [0, 0, 0, 0]
        cuda = rank.cuda
        for record in step.phases:
            place = _PLACE.get(record.name)
            if place is None:
                continue
            if cuda and place > 0:
                if place > 1:
                    continue
                device_us = record.device_us
                parts[1] = device_us if device_us is not None else record.host_us - record.collective_us
            else:
                parts[place] = record.host_us - record.collective_us
        rank.parts.append(parts)
        rank.own.append(sum(parts))
        rank.host.append(step.host_us)
        number = step.step
        arrived = self._arrived.get(number, 0) + 1
        if arrived < len(self._ranks):
            self._arrived[number] = arrived
            return []
        self._arrived = {later: count for later, count in self._arrived.items() if later > number}
        return self._judge(t, number)

    def _judge(self, t: float, number: int) -> list[Alert]:
        medians = {key: _median(rank.own) for key, rank in self._ranks.items() if len(rank.own) == WINDOW}
        if len(medians) < 2:
            return []
        ordered = sorted(medians.values())
        # Whoever is not above this cannot be slow, whichever rank it is taken out: most ranks stop here.
        bar = FINE_RATIO * ordered[(len(ordered) - 2) // 2]
        alerts: list[Alert] = []
        for key, own in medians.items():
            rank = self._ranks[key]
            if own <= bar and not rank.slow:
                continue
            others = _median_without(ordered, own)
            excess = own - others
            ratio = SLOW_RATIO if rank.cuda else SLOW_RATIO_CPU
            usual_step = _median(rank.host)
            if own > ratio * others and excess > max(EXCESS_US, EXCESS_SHARE * usual_step):
                rank.slow += 1
                rank.fine = 0
                if rank.slow == SLOW_STEPS or (rank.slow > SLOW_STEPS and rank.slow % UPDATE_STEPS == 0):
                    alerts += self._raise(t, number, key, own, others, usual_step)
            elif rank.slow < SLOW_STEPS:
                rank.slow = 0
            elif own < FINE_RATIO * others:
                rank.fine += 1
                if rank.fine >= FINE_STEPS:
                    rank.slow = rank.fine = 0
                    alerts += self._book.resolve(t, _key(key), f"As fast as the others again at step {number}.")
        return alerts

    def _raise(self, t: float, number: int, key: int, own: int, others: int, usual_step: int) -> list[Alert]:
        mine = [_median([parts[place] for parts in self._ranks[key].parts]) for place in range(4)]
        theirs = [
            _median(
                [_median([parts[place] for parts in rank.parts]) for other, rank in self._ranks.items() if other != key]
            )
            for place in range(4)
        ]
        worst = max(range(4), key=lambda place: mine[place] - theirs[place])
        phase = PARTS[worst]
        excess = own - others
        device = self._hindered.why(key) if phase != "data" else None
        why = device.words if device is not None else ""
        return self._book.raise_alert(
            t,
            "slow",
            "warning",
            f"rank {key} is slow at {phase}: {duration(mine[worst] * 1e-6)}, others {duration(theirs[worst] * 1e-6)}"
            + (f"; {why}" if why else ""),
            rule="own-work",
            rank=key,
            step=number,
            text=(
                f"Before its collectives rank {key} works {duration(own * 1e-6)} a step, the others "
                f"{duration(others * 1e-6)} (median of {WINDOW} steps). They wait for it, about "
                f"{duration(excess * 1e-6)} of a step of {duration(usual_step * 1e-6)}. "
                + (f"{why[0].upper()}{why[1:]}." if why else _CAUSES[phase])
            ),
            evidence={
                "own_ms": round(own / 1e3, 3),
                "others_ms": round(others / 1e3, 3),
                "ratio": round(own / max(1, others), 3),
                "step_ms": round(usual_step / 1e3, 3),
                "slow_at": phase,
                "own_ms_by_phase": {name: round(mine[place] / 1e3, 3) for name, place in _PLACE.items()},
                "others_ms_by_phase": {name: round(theirs[place] / 1e3, 3) for name, place in _PLACE.items()},
                "window_steps": WINDOW,
                **({"device": device.evidence} if device is not None and device.evidence else {}),
            },
            repeat=False,
        )

    def restore(self, alert: Alert) -> None:
        """Take in a standing alert of the recording, so that it can end."""
        if alert.rank is not None and alert.resolved is None:
            self._ranks.setdefault(alert.rank, _Rank()).slow = SLOW_STEPS


def _key(rank: int) -> Key:
    return "slow", rank, "", "own-work"


def _median(values: "deque[int] | list[int]") -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _median_without(ordered: list[int], value: int) -> int:
    """Return the lower median of sorted values with one occurrence of ``value`` left out."""
    half = (len(ordered) - 2) // 2
    return ordered[half] if value > ordered[half] else ordered[half + 1]
