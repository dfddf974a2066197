"""What must hold after the blows. Each function adds what does not to ``wrong``, and returns what was measured."""

import statistics
from itertools import pairwise

from ftmon.protocol.messages.control import HubStats
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.reader import Reader

from .scene import Scene
from .training import STEP_SECONDS, own_steps

PAUSE_STEPS = 6
"""A step this many times as long as usual is a pause."""
LOST_SECONDS = 1.0


def pause(scene: Scene, until: float, wrong: list[str]) -> float:
    """Give how many usual steps the longest one took, before the training itself was struck."""
    longest = 0.0
    for rank in (0, 1):
        times = [t for _, t in own_steps(scene.folder, rank) if t < until]
        gaps = [(b - a, a, b) for a, b in pairwise(times[10:])]
        usual = statistics.median(gap for gap, _, _ in gaps)
        counted = [gap for gap, a, b in gaps if not any(a < end and b > begin for begin, end in scene.excused)]
        if max(counted) > PAUSE_STEPS * usual and max(counted) > 0.5:
            wrong.append(f"the training paused {max(counted):.2f} s")
        longest = max(longest, max(counted) / usual)
    return longest


def recorded(scene: Scene, until: float, may_miss: bool, wrong: list[str]) -> tuple[int, float, str]:
    """Compare the recording with what the ranks themselves noted.

    Args:
        scene: the run.
        until: what was done later need not be in the recording.
        may_miss: the blows allow for any gap.
        wrong: gets what does not hold.

    Returns:
        Steps missing, the longest gap in seconds, and what the recording tells of it.
    """
    found: dict[int, set[int]] = {0: set(), 1: set()}
    lost: dict[tuple[int, str], int] = {}
    with Reader(scene.run.recording) as reader:
        after = 0
        while frames := reader.frames(after, 5000):
            after = frames[-1].seq
            for frame in frames:
                if isinstance(frame.message, Step):
                    found[frame.message.rank].add(frame.message.step)
                elif isinstance(frame.message, HubStats):
                    lost |= {(frame.message.pid, sender): count for sender, count in frame.message.lost.items()}
        told = reader.info().missing
    missing, longest = 0, 0.0
    for rank in (0, 1):
        gone = [t for step, t in own_steps(scene.folder, rank) if step not in found[rank] and t < until - 1.0]
        missing += len(gone)
        begun = previous = None
        for t in gone:
            if previous is None or t - previous > 4 * STEP_SECONDS:
                begun = t
            previous = t
            longest = max(longest, t - (begun or t) + STEP_SECONDS)
        counted = sum(count for (_, sender), count in lost.items() if sender.startswith(f"rank-{rank}-"))
        if rank in scene.counted and not may_miss and len(gone) > counted:
            wrong.append(f"{len(gone)} steps of rank {rank} are missing, and {counted} messages are counted as lost")
    if longest > LOST_SECONDS + STEP_SECONDS and not may_miss:
        wrong.append(f"{missing} steps are missing, {longest:.1f} s in a piece ({told})")
    return missing, longest, told


def verdicts(scene: Scene, wrong: list[str]) -> None:
    """See that nobody was named but who was struck."""
    for alert in scene.alerts("hang", "died", "failure", "oom"):
        named = set(alert.evidence.get("hung", [] if alert.rank is None else [alert.rank]))
        if alert.severity != "info" and not named <= scene.hit:
            wrong.append(f"wrong verdict: {alert.title}")
