"""``ftmon memory``, ``events``, ``snapshot`` and ``capture``: the memory of a run's ranks, and memory snapshots."""

import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from typing import Any

import msgspec

from ...protocol.analysis import oom_report
from ...protocol.analysis.allocator import snapshot_layout, snapshot_views
from ...protocol.analysis.allocator.snapshot_replay import Replay
from ...protocol.errors import HubError, RunDirError, UsageError
from ...protocol.messages import control
from ...protocol.messages.memory import Cause
from ...protocol.messages.telemetry import AllocatorEvents
from ...protocol.recording.results import PeakMark
from ...protocol.run import exits, rundir
from ...protocol.run.rundir import RunDir
from ...protocol.text import gib, sanitize, wrapped
from ..model.oom import evidence_words, group_parts, shown_bytes, spike_alert, verdict_of, verdict_words
from ..model.peaks import phase_words, ranking_sentences
from ..model.rank import RankModel, phase_rates, segment_bytes
from ..model.run import RunModel
from ..model.waterfall import REASONS, Waterfall, unanalysed, waterfall
from ..source.load import describe, load, open_replays
from . import output
from .access import ask, check_rank, living_hub, opened
from .follow import DRAIN_SECONDS, Standing, pumped
from .output import print_json

_LABEL = 24
_CPU_NOTE = "on a CPU, peaks are of the resident set; there is no reserved memory"


def show_memory(arguments: Namespace) -> int:
    """Print the composition of the peaks of a run's ranks, the leading phase, and the causes of spikes."""
    model = _load_model(arguments.run)
    check_rank(model.ranks, arguments.rank)
    ranks = list(model.ranks.values()) if arguments.rank is None else [model.ranks[arguments.rank]]
    if arguments.json:
        print_json({"run": model.info.id, "ranks": [_rank_data(model, rank) for rank in ranks]})
        return 0
    if not ranks:
        print("no rank has reported yet")
    for index, rank in enumerate(ranks):
        if index:
            print()
        for line in rank_lines(model, rank):
            print(wrapped(line, 1))
    return 0


def _load_model(run: str) -> RunModel:
    with opened(rundir.find_recording(run)) as reader:
        info = reader.info()
        model = load(reader, info.last_t, describe(info))
        marks: dict[int, list[PeakMark]] = {}
        for mark in reader.marks():
            marks.setdefault(mark.rank, []).append(mark)
    for number, found in marks.items():
        model.rank(number).memory.adopt(found)
    return model


def measured_parts(run: str) -> dict[str, int]:
    """Return the highest bytes of each part over the ranks' analysed steps.

    On the CPU only what walking the model, the engine and the optimizer finds: peaks there are of the resident set.
    """
    found: dict[str, int] = {}
    for rank in _load_model(run).ranks.values():
        for taken in filter(None, (rank.memory.latest, rank.memory.highest)):
            of_phases = [one.parts for one in taken.phases] if taken.measure == "cuda" else []
            for parts in (taken.known, *of_phases):
                found |= {name: max(size, found.get(name, 0)) for name, size in parts.items()}
    return found


def _rank_fall(model: RunModel, rank: RankModel) -> Waterfall | None:
    """Return the waterfall of a rank's last analysed step, else of its last step."""
    sample = model.device_of(rank)
    composition = rank.memory.latest
    made = waterfall(rank, composition, "", sample) if composition is not None else None
    return made or unanalysed(rank, "", sample)


def rank_lines(model: RunModel, rank: RankModel) -> Iterator[str]:
    """Yield the lines of one rank's memory."""
    fall = _rank_fall(model, rank)
    if fall is None:
        yield f"rank {rank.rank}: no step is finished yet"
        return
    following = f"; next {fall.next[0]} {gib(fall.next[1])}" if fall.next else ""
    updated = "" if rank.last is not None else ", without an update so far"
    head = f"rank {rank.rank}, step {fall.step:,}{updated}: {gib(fall.peak)} in {phase_words(fall.phase)}{following}"
    composition = rank.memory.latest
    if composition is not None and fall.taken_apart:
        at = time.strftime("%H:%M:%S", time.localtime(composition.time))
        head += f" ({at}, {REASONS.get(composition.reason, composition.reason)})"
    yield sanitize(head)
    yield from (_row(part.label, part.bytes, fall.peak) for part in fall.parts)
    yield _row("resident" if fall.measure == "glibc" else "allocated", fall.peak, fall.peak)
    if fall.measure == "glibc":
        yield f"  {_CPU_NOTE}"
    else:
        yield _row("unused but reserved", fall.unused, 0)
        yield _row("CUDA context, NCCL", fall.context, 0)
        yield _row("other processes", fall.others, 0)
        yield _row("used (NVML)", fall.used, 0) + (f"  of {gib(fall.total)}" if fall.total else "")
        if fall.unexplained is not None:
            yield _row("unexplained", fall.unexplained, 0)
        if fall.used and abs(fall.since) > 0.01 * fall.used:
            yield f"  reserved {'grew' if fall.since > 0 else 'shrank'} {gib(abs(fall.since))} since that peak"
    if composition is not None and composition.note:
        yield f"  note: {sanitize(composition.note)}"
    ranking = rank.memory.ranking
    yield from (f"  {sentence}" for sentence in (ranking_sentences(ranking) if ranking is not None else []))
    for cause in rank.memory.causes.values():
        yield from _cause_lines(model, rank, cause)


def _row(label: str, size: int | None, whole: int) -> str:
    figure = "-" if size is None else gib(size) if size else "0"
    share = f"{size / whole * 100:5.0f} %" if size is not None and whole else ""
    return f"  {sanitize(label, _LABEL):<{_LABEL}}{figure:>12}{share}".rstrip()


def _cause_lines(model: RunModel, rank: RankModel, cause: Cause) -> Iterator[str]:
    what = "stayed after" if cause.reason == "leak" else "was allocated and freed in"
    yield f"  {sanitize(cause.phase)}: {gib(cause.transient_bytes)} {what} step {cause.step:,}; {evidence_words(cause)}"
    verdict = verdict_of(spike_alert(model.alerts, rank.rank, cause.phase))
    yield from (f"    {words}" for words in (verdict_words(verdict) if verdict is not None else []))
    for group in cause.groups:
        innermost, own = group_parts(group)
        line = f"    {gib(shown_bytes(cause, group)):>10}  x{group.count:<6,} {innermost}"
        yield f"{line}  < {own}" if own else line


_OUTSIDE = ("unused", "context", "others", "unexplained", "used")


def _rank_data(model: RunModel, rank: RankModel) -> dict[str, Any]:
    fall, memory, ranking = _rank_fall(model, rank), rank.memory, rank.memory.ranking
    lead = ranking and {
        "standing": msgspec.to_builtins(list(ranking.standing)),
        "by_bytes": ranking.by,
        "words": ranking_sentences(ranking),
    }
    return {
        "rank": rank.rank,
        "measure": rank.hello.memory_measure if rank.hello else "",
        "step": fall.step if fall else 0,
        "phase": fall.phase if fall else "",
        "peak_bytes": fall.peak if fall else 0,
        "taken_apart": fall.taken_apart if fall else False,
        "parts": {part.name: part.bytes for part in fall.parts} if fall and fall.taken_apart else {},
        "phases": [{"phase": name, "peak_bytes": size} for name, size in (fall.standing if fall else ())],
        **{f"{name}_bytes": getattr(fall, name, None) for name in _OUTSIDE},
        "total_bytes": fall.total if fall else 0,
        "lead": lead,
        "latest": memory.latest and msgspec.to_builtins(memory.latest),
        "highest": memory.highest and msgspec.to_builtins(memory.highest),
        "causes": msgspec.to_builtins(list(memory.causes.values())),
        "snapshots": msgspec.to_builtins(list(rank.snapshots)),
    }


_WHOLE = 1 << 30  # a limit above any number of samples of a rank


def show_events(arguments: Namespace) -> int:
    """Print the sampled steps of a run, and with ``--follow`` later ones until it ends."""
    run = rundir.find_run(arguments.run)
    if run is None and arguments.follow:
        raise UsageError(f"{arguments.run}: is a recording on its own, which --follow cannot follow; name a run")
    with opened(rundir.find_recording(arguments.run)) as reader:
        known = reader.info().ranks
        if known or not arguments.follow:  # a run that has just begun has none yet
            check_rank(known, arguments.rank)
        ranks = known if arguments.rank is None else [arguments.rank]
        frames = [frame for rank in ranks for frame in reader.sampled("events", rank, _WHOLE)]
        left_out = reader.left_out
    printed: dict[int, float] = {}
    for frame in sorted(frames, key=lambda frame: frame.seq):
        if isinstance(frame.message, AllocatorEvents):
            printed[frame.message.rank] = frame.message.time
            _print_events(frame.message, arguments.json)
    sys.stdout.flush()
    ended = _has_ended(run)
    if not frames and not left_out and (ended or not arguments.follow):
        print(f"no step of this run was sampled{'' if ended else ' yet (--follow waits for it)'}", file=sys.stderr)
    if run is None or not arguments.follow or ended:
        return 0
    return _follow(run, arguments.rank, printed, arguments.json)


def _has_ended(run: RunDir | None) -> bool:
    try:
        return run is None or run.read_exit() is not None
    except RunDirError:
        return True


def _follow(run: RunDir, rank: int | None, printed: dict[int, float], as_json: bool) -> int:
    """Print newly sampled steps; return the exit status of the run's end, or 130 after Ctrl-C."""
    from ..source.live import LiveSource

    source, standing = LiveSource(run), Standing(run)
    drained_by = 0.0
    with closing(pumped(source)) as pumping:
        for _ in pumping:
            for events in _news(source.model, rank, printed):
                _print_events(events, as_json)
            sys.stdout.flush()
            end = standing.end() or standing.end_without_launcher(source.model)
            if end is not None:
                drained_by = drained_by or time.monotonic() + DRAIN_SECONDS
                if source.model.ended or time.monotonic() > drained_by:
                    return exits.of_run(end)
    return exits.INTERRUPTED


def _news(model: RunModel, wanted: int | None, printed: dict[int, float]) -> Iterator[AllocatorEvents]:
    """Yield the samples after each rank's last printed one, by time, as a later job's steps count from 1 again."""
    found: list[AllocatorEvents] = []
    for number, rank in model.ranks.items():
        last = rank.allocator.last
        if wanted not in (None, number) or last is None or last.time <= printed.get(number, 0.0):
            continue
        found += [events for events in rank.allocator.samples if events.time > printed.get(number, 0.0)]
        printed[number] = last.time
    yield from sorted(found, key=lambda events: (events.time, events.rank))


def _print_events(events: AllocatorEvents, as_json: bool) -> None:
    if as_json:
        rates = {
            phase.name: {"allocations_per_second": allocations, "bytes_per_second": size}
            for phase, allocations, size in phase_rates(events)
        }
        whole = {**msgspec.to_builtins(events), "segment_bytes": segment_bytes(events), "rates": rates}
        print_json(whole, indent=False)
        return
    for line in event_lines(events):
        print(line)


def event_lines(events: AllocatorEvents) -> Iterator[str]:
    """Yield the lines of a sampled step: one per phase, and one for growth, flushes or much unused memory."""
    at = time.strftime("%H:%M:%S", time.localtime(events.time))
    head = f"{at} rank {events.rank} step {events.step}"
    for row in phase_rates(events):
        speed = ""
        if row.allocations_per_second is not None and row.bytes_per_second is not None:
            speed = f"  {row.allocations_per_second:,.0f}/s  {gib(row.bytes_per_second)}/s"
        phase = row.phase
        grown = f"  reserved {_signed(phase.segment_bytes)}" if phase.segment_bytes else ""
        counts = f"{phase.allocations:,} allocations, {gib(phase.allocated_bytes)}, largest {gib(row.largest)}"
        yield f"{head} {sanitize(phase.name, 16):<9} {counts}{speed}{grown}"
    more = [f"{events.retries} retries, each after the allocator freed its cache"] if events.retries else []
    if events.reserved_bytes:
        share = max(0.0, 1 - events.allocated_bytes / events.reserved_bytes)
        more.append(
            f"{share * 100:.0f} % of {gib(events.reserved_bytes)} reserved is unused, "
            f"largest free block {gib(events.largest_free_block_bytes)}"
        )
    if more:
        yield f"{head} {'step':<9} {'; '.join(more)}"


_LARGE = 4 * 2**20  # minimum size of a file, bytes, for which a message is shown while it is read


def explore(arguments: Namespace) -> int:
    """Open a snapshot, or two for a comparison, in the app if the terminal supports it, else as text."""
    as_text = arguments.text
    if not arguments.json and not as_text and (reason := output.why_no_app()):
        as_text = True
        if sys.stderr.isatty():
            print(f"ftmon: {reason}; text instead", file=sys.stderr)
    files = [arguments.file, *([arguments.second] if arguments.second else [])]
    in_app = not arguments.json and not as_text
    meanwhile = (lambda: import_module("..screens.snapshot", __package__)) if in_app else None
    opened = [_replays(file, arguments.device, meanwhile) for file in files]
    if in_app:
        from ..screens.snapshot import run_explorer

        before = opened[0] if len(opened) > 1 else []
        return run_explorer(opened[-1], before, ascii_only=output.draws_ascii(arguments))
    if arguments.json:
        # Of two files, the second is described as the present state, with its differences from the first.
        snapshot, replays = opened[-1][0].snapshot, opened[-1]
        result = snapshot_views.report(snapshot, replays, arguments.top)
        result["oom"] = oom_report.description(snapshot, replays)
        if len(opened) == 2:
            compared = snapshot_views.difference_report(opened[0], opened[1], arguments.top)
            result = result | {"difference": {"before": opened[0][0].snapshot.path, **compared}}
        print_json(result)
        return 0

    text = [line for replay in opened[-1] for line in (*_device(replay, arguments.top), "")][:-1]
    if len(opened) == 2:
        text = [*_difference_lines(opened[0], opened[1], arguments.top), "", *text]
    for line in text:
        print(line.encode("ascii", "replace").decode() if output.draws_ascii(arguments) else line)
    return 0


def _replays(file: str, device: int | None, meanwhile: Callable[[], object] | None) -> list[Replay]:
    def choose(devices: list[int]) -> list[int]:
        if device is not None and device not in devices:
            raise UsageError(f"{file}: no device {device} in it, only {', '.join(map(str, devices))}")
        return [one for one in devices if device in (None, one)]

    with _patience(file):
        return open_replays(file, choose, meanwhile)


@contextmanager
def _patience(file: str) -> Generator[None, None, None]:
    text = f"ftmon: reading {file} ..."
    says = sys.stderr.isatty() and os.path.isfile(file) and os.path.getsize(file) >= _LARGE
    if says:
        print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if says:
            print("\r" + " " * len(text) + "\r", end="", file=sys.stderr, flush=True)


_STACKS_SHOWN, _DEPTH = 8, 12


def _device(replay: Replay, top: int) -> Iterator[str]:
    snapshot = replay.snapshot
    yield f"{sanitize(snapshot.path)}  device {replay.device}"
    yield (
        f"at its end: allocated {gib(replay.allocated[-1])}, active {gib(replay.active[-1])}, "
        f"requested {gib(replay.requested[-1])}, reserved {gib(replay.reserved[-1])}"
    )
    moment = "before the first entry" if replay.peak_index < 0 else f"at entry {replay.peak_index:,}"
    if replay.entries:
        yield f"{replay.entries:,} trace entries; highest allocated {gib(replay.peak_bytes)} {moment}"
    else:
        yield "no history was recorded: torch.cuda.memory._record_memory_history() before the part of interest"
    of = replay.allocations
    if of.unsure_bytes:
        yield f"{of.unsure} blocks older than the trace have no exact size; figures may be {gib(of.unsure_bytes)} low"
    if of.lost:
        yield f"{of.lost:,} frees are missing from the trace, which has gaps"
    if (report := oom_report.report_of(snapshot, [replay])) is not None:
        yield ""
        yield f"out of memory at entry {replay.oom_index():,}"
        yield from (f"  {line}" for line in oom_report.verdict_lines(report, replay))
        frames = oom_report.failing_frames(replay)[:_DEPTH]
        yield from (f"    {snapshot_layout.frame_words(frame)}" for frame in frames)
    yield ""
    yield "fragmentation at the end"
    holes = snapshot_layout.fragmentation(snapshot_layout.layout_at(replay, replay.last))
    yield from (f"  {line}" for line in snapshot_layout.fragmentation_words(holes))
    yield ""
    yield f"live at the highest point, {gib(replay.peak_bytes)}, by stack (library frames folded)"
    yield from _tree(snapshot_layout.stack_tree(snapshot, snapshot_views.live_stacks(replay, replay.peak_index)), top)
    yield ""
    yield "largest blocks then"
    for number in snapshot_views.largest(replay, replay.peak_index, min(top, _STACKS_SHOWN)):
        yield f"  {gib(of.sizes[number]):>12}  {snapshot_views.place(snapshot, of.stacks[number])}"


def _tree(root: snapshot_layout.Node, most: int) -> Iterator[str]:
    left = most
    waiting = [(node, 0) for node in reversed(root.ordered())]
    while waiting and left:
        node, depth = waiting.pop()
        left -= 1
        words = snapshot_layout.node_words(node)
        yield f"  {gib(node.bytes):>12} {node.blocks:>7,}  {'  ' * depth}{words}"
        waiting += [(child, depth + 1) for child in reversed(node.ordered())]
    if root.bytes and not root.children:
        yield f"  {gib(root.bytes):>12} {root.blocks:>7,}  no stacks were recorded"
    if waiting:
        yield f"  {'':>12} {'':>7}  and {len(waiting):,} more branches (--top shows more)"


def _difference_lines(before: list[Replay], after: list[Replay], top: int) -> list[str]:
    """Return the differences in live memory at the ends of two snapshots, by stack."""
    lines = [f"from {sanitize(before[0].snapshot.path)} to {sanitize(after[0].snapshot.path)}"]
    for old in before:
        new = next((replay for replay in after if replay.device == old.device), None)
        if new is None:
            lines.append(f"device {old.device}: only in the first")
            continue
        lines.append(
            f"device {old.device}: allocated {_signed(new.allocated[-1] - old.allocated[-1])}, "
            f"reserved {_signed(new.reserved[-1] - old.reserved[-1])}, "
            f"highest allocated {_signed(new.peak_bytes - old.peak_bytes)}"
        )
        for change in snapshot_views.difference(old, old.last, new, new.last)[:top]:
            where = " < ".join(snapshot_layout.frame_words(frame).replace("  ", " ") for frame in change.frames[:3])
            lines.append(f"  {_signed(change.bytes):>13} {change.blocks:>+7,}  {where or snapshot_views.NO_STACK}")
    known = {old.device for old in before}
    return lines + [f"device {new.device}: only in the second" for new in after if new.device not in known]


def _signed(count: int) -> str:
    return ("+" if count > 0 else "") + gib(count)


def capture(arguments: Namespace) -> int:
    """Request a memory snapshot of a run's ranks and print the paths; return 1 if a rank wrote none."""
    run = rundir.find(arguments.run)
    if run.read_exit() is not None:
        raise HubError(f"{run.id} has ended: its snapshots, if it has any, are in {run.snapshots}")
    verb = control.Snapshot(sorted(set(arguments.rank)))
    result = ask(living_hub(run), verb, on_accepted=lambda text: print(text, file=sys.stderr, flush=True))
    answers = result.data.get("answers")
    paths = [
        answer["path"]
        for answer in (answers.values() if isinstance(answers, dict) else ())
        if isinstance(answer, dict) and isinstance(answer.get("path"), str)
    ]
    for path in paths:
        print(sanitize(path))
    if not result.ok or not paths:
        print(f"ftmon: {sanitize(result.text)}", file=sys.stderr)
        return 1
    if sys.stdout.isatty():
        print(f"open it: ftmon snapshot {shlex.quote(sanitize(paths[0]))}", file=sys.stderr)
    return 0
