"""Text of stalls: hangs, stopped ranks, unreachable ranks."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ...text import duration, ranks_in_words, sanitize
from ..findings.alerts import RANKS_LISTED
from ..findings.finding import HIDDEN, Finding, Kind, Shown
from ..words import Added, Words
from .collectives import STOPPED, TRACED, Difference, collective, where
from .evidence import Evidence
from .hang_detector import (
    GATHERED,
    Cause,
    HangFacts,
    Since,
    Spot,
    StoppedFacts,
    UnreachableFacts,
    WaitingRanks,
    cause_of,
)
from .judge import CircularWait, OtherRanks, RanAhead, StaleLocks, Unclear, Verdict, ranks_of

STACK_LINES = 8


def _stopped(facts: StoppedFacts, finding: Finding) -> Words:
    go_on = "A debugger continues it, or detaches from it" if facts.traced else f"'kill -CONT {facts.pid}' continues it"
    return Words(
        f"rank {finding.rank} is {TRACED if facts.traced else STOPPED}",
        f"Its process exists but does not run; the other ranks will wait for it. {go_on}; 'ftmon kill' ends it.",
    )


def _is_unreachable(facts: UnreachableFacts, finding: Finding) -> Words:
    return Words(
        f"{ranks_in_words(finding.ranks)} unreachable{f': {facts.state}' if facts.state else ''}",
        "The probe there sends nothing. That alone does not show a fault in the training: native code may hold "
        "the GIL, or the link to that host may be down.",
    )


def of_verdict(verdict: Verdict) -> Words:
    """Return the text of a verdict."""
    if (cause := cause_of(verdict)) is not None:
        words = _what_the_script_does(cause, verdict)
    elif verdict.kind == "mismatch" and isinstance(verdict.facts, OtherRanks):
        words = _elsewhere(verdict, verdict.facts)
    else:
        words = {
            "missing": _missing,
            "ahead": _ahead,
            "lock": _lock,
            "alone": _alone,
            "mismatch": _mismatch,
            "deadlock": _deadlock,
            "unreachable": _unreachable,
            "unclear": _unclear,
            "exit": _exit,
        }[verdict.kind](verdict)
    doubt = " NCCL's own counters (RAS) show that other ranks are behind, so this is not certain."
    return words._replace(text=words.text + doubt) if verdict.contradicted else words


def _what_the_script_does(cause: Cause, verdict: Verdict) -> Words:
    apart, others = cause.apart, cause.others
    spots = (*apart, *others)
    first = spots[0]
    where_others = _together(others)
    match cause.kind:
        case "left_loop":
            waits = f" and {_wait(apart)} in {_at(first)}"
            over = ": its script has ended" if len(apart) == 1 else ": their scripts have ended"
            title = f"{_ranks(apart)} left the loop after step {first.step}{over if first.ended else waits}"
            title += f"; {where_others}: unequal data, or an early stop"
            remedy = "Give every rank the same number of batches (drop_last=True), or stop all ranks together."
        case "not_on_all_ranks":
            title = f"{_ranks(apart)} {'is' if len(apart) == 1 else 'are'} in {_at(first)}"
            title += f", which all ranks must call; {where_others}"
            remedy = f"Call {first.call} on all ranks, outside of a condition on the rank."
        case "unequal_gathers":
            counts = _ways({s.rank: {0: "never", 1: "once"}.get(s.gathers, f"{s.gathers} times") for s in spots})
            times = ", ".join(f"{count} on {ranks_in_words(ranks)}" for count, ranks in counts.items())
            at = next((spot for spot in spots if spot.call == GATHERED), first)
            rest = [spot for spot in spots if spot.rank != at.rank]
            title = f"{GATHERED} entered {times}: {_together((at,))}; {_together(rest)}"
            remedy = f"Enter {GATHERED} on all ranks, and equally often: it gathers with a collective."
        case "sizes":
            sizes = "; ".join(f"{_ranks((s,))}: {s.elements:,} elements, {s.line}" for s in spots[:4])
            name = verdict.collective.name if verdict.collective is not None else ""
            title = f"{name or first.call or 'collective'} of different sizes: {sizes}"
            remedy = "Give the tensor the same size on all ranks, or gather the sizes first and pad."
        case "branch":
            title = "; ".join(part for part in (_together(apart), where_others) if part)
            title += ": the ranks take different branches"
            remedy = (
                "Have every rank enter the same collectives in the same order: check conditions that differ by rank."
            )
    detail = "" if cause.kind == "left_loop" and first.ended else f" {_detail(verdict)}"
    return Words(
        title,
        f"{_waiting(verdict.waiting)} {duration(verdict.age)} for each other or for a "
        f"rank that will not come; none can continue.{detail}",
        remedy,
    )


def _detail(verdict: Verdict) -> str:
    if isinstance(verdict.facts, CircularWait):
        ways = _ways({rank: collective(call) for rank, call in verdict.facts.calls.items()})
        return f"{'; '.join(f'{ranks_in_words(ranks)} in {words}' for words, ranks in ways.items())}."
    if isinstance(verdict.facts, Difference):
        return f"Collective {collective(verdict.collective)}: {_different(verdict.facts)}."
    return f"In {collective(verdict.collective)}." if verdict.collective is not None else ""


def _together(spots: Sequence[Spot]) -> str:
    """Return where ranks are, those at one place together: ``rank 1 waits in step 61, in step(), train.py:38``."""
    ways: dict[tuple[bool, str], list[int]] = {}
    for spot in spots:
        step = f"in step {spot.step}" if spot.in_step else f"after step {spot.step}"
        ways.setdefault((spot.ended, step if spot.ended else f"{step}, in {_at(spot)}"), []).append(spot.rank)
    return "; ".join(
        f"{ranks_in_words(ranks)} {'has' if len(ranks) == 1 else 'have'} ended {where}"
        if ended
        else f"{_waiting(ranks)} {where}"
        for (ended, where), ranks in list(ways.items())[:4]
    )


def _at(spot: Spot) -> str:
    return f"{spot.call}, {spot.line}" if spot.call and spot.line else spot.call or spot.line or "an unknown line"


def _ranks(spots: Sequence[Spot]) -> str:
    return ranks_in_words([spot.rank for spot in spots])


def _mismatch(verdict: Verdict) -> Words:
    if not isinstance(verdict.facts, Difference):
        calls = _by_words({rank: view.inside for rank, view in verdict.views.items()})
        return Words(
            f"mismatched collectives for {duration(verdict.age)}: {calls}",
            f"Every rank is inside its collective {collective(verdict.collective)}, but not the same one ({calls}). "
            "They wait for each other forever. Check for code that takes another branch on some ranks.",
        )
    odd, shapes, calls = verdict.differs, verdict.facts.shapes, _different(verdict.facts)
    differs = f" {ranks_in_words(odd)} {'differs' if len(odd) == 1 else 'differ'} from the others." if odd else ""
    return Words(
        f"{'mismatched shapes' if shapes else 'mismatched collectives'} for {duration(verdict.age)}: {calls}",
        f"Collective {collective(verdict.collective)} was not entered alike: {calls}.{differs} "
        "They wait for each other forever. Check for "
        f"{'sizes that differ between ranks' if shapes else 'code that takes another branch on some ranks'}.",
    )


def _elsewhere(verdict: Verdict, facts: OtherRanks) -> Words:
    """Ranks wait in a collective for ranks that wait in a send or a receive."""
    who = ranks_in_words(facts.ranks)
    others = ranks_in_words([rank for rank in verdict.waiting if rank not in facts.ranks])
    inside = " and ".join(sorted({verdict.views[rank].inside for rank in facts.ranks}))
    name = verdict.collective.name if verdict.collective is not None else ""
    return Words(
        f"mismatched calls for {duration(verdict.age)}: {who}: {inside}; {others}: {collective(verdict.collective)}",
        f"{_waiting(facts.ranks)} in {inside} for another rank, and {others} in {name} for {who}. Check for a send "
        "without a matching receive, or a branch that only some ranks take.",
    )


def _deadlock(verdict: Verdict) -> Words:
    found = verdict.facts.calls if isinstance(verdict.facts, CircularWait) else {}
    ways = _ways({rank: collective(call) for rank, call in found.items()})
    calls = "; ".join(f"{_waiting(ranks)} in {words}" for words, ranks in ways.items())
    return Words(
        f"deadlock of process groups for {duration(verdict.age)}: {calls}",
        f"{calls}. Each waits for a rank that waits in another group, so none can continue. "
        "Have all ranks enter the collectives of their groups in the same order.",
    )


def _unreachable(verdict: Verdict) -> Words:
    who = ranks_in_words(verdict.facts.ranks) if isinstance(verdict.facts, OtherRanks) else ""
    within = f" in {collective(verdict.collective)}" if verdict.collective is not None else ""
    waits = f"{_waiting(verdict.waiting)} {duration(verdict.age)}{within}"
    return Words(
        f"{waits}: the host of {who} is cut off",
        f"{waits}. No message arrives from the host of {who}, so the state of its ranks is unknown. Once the link is "
        "restored, the training may continue by itself.",
    )


def _missing(verdict: Verdict) -> Words:
    who, name = ranks_in_words(verdict.hung), collective(verdict.collective)
    late = [view for rank, view in verdict.views.items() if rank in verdict.hung]
    age = max(view.age for rank, view in verdict.views.items() if rank in verdict.waiting)
    waits = f"{_waiting(verdict.waiting)} {duration(age)}"
    places = sorted({where(view) for view in late})
    at = places[0] if len(places) == 1 else "; ".join(f"rank {view.rank}: {where(view)}" for view in late[:4])
    go_on = "continues" if len(late) == 1 else "continue"
    # A rank that is stopped or gone may have entered the collective; it blocks the others nonetheless.
    if name and not all(view.is_unable for view in late):
        asleep = all(view.evidence is not None and view.evidence.is_asleep for view in late)
        verb = ("sleeps" if asleep else "is") if len(late) == 1 else ("sleep" if asleep else "are")
        place = f"{who} {verb} {at}, and" if len(places) == 1 else f"{at};"
        fault = f"{place} {'has' if len(late) == 1 else 'have'} not entered {name}"
    else:
        fault = f"{who}: {at}"
    return Words(
        f"{fault}; {waits}",
        f"{waits}{f' in {name}' if name else ''}, held up by {who}: {at}. "
        f"The stacks of {who} show the line. The wait ends only if {who} {go_on}.",
    )


def _ahead(verdict: Verdict) -> Words:
    who, others, name = ranks_in_words(verdict.hung), _waiting(verdict.waiting), collective(verdict.collective)
    skips = "skips" if len(verdict.hung) == 1 else "skip"
    steps = verdict.facts if isinstance(verdict.facts, RanAhead) else RanAhead(0, 0)
    return Words(
        f"{who} {skips} collectives and ran ahead; {others} {duration(verdict.age)} in {name}",
        f"{who} reached step {steps.step} without entering {name}, in which {others} in step {steps.behind}. "
        "That collective can never complete, and the ranks' parameters differ from then on. Check for a condition "
        "that differs between ranks: no_sync(), an accumulation boundary, a skipped backward.",
    )


def _lock(verdict: Verdict) -> Words:
    waits = _waiting(verdict.waiting)
    paths = [sanitize(path, 400) for path in (verdict.facts.paths if isinstance(verdict.facts, StaleLocks) else ())]
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return Words(
        f"{waits} for the build lock {paths[0]}{more}, and no compiler runs",
        f"{waits} {duration(verdict.age)} for the lock of a PyTorch extension's build. No compiler runs and "
        "no file beside the lock has changed lately: a build that was killed left it behind. "
        f"Remove it: rm {' '.join(map(shlex.quote, paths[:4]))}; the ranks then continue by themselves.",
    )


def _alone(verdict: Verdict) -> Words:
    views = sorted(verdict.views.values(), key=lambda view: -view.age)
    who = f"{ranks_in_words(verdict.hung)} made no progress"
    if len({where(view) for view in views}) == 1:
        worst, age, place = views[0], duration(verdict.age), where(views[0])
        title = f"{who} for {age}, {place}"
        text = f"{who} for {age} in step {worst.step}, {place}"
        text += f"; that phase usually allows {duration(worst.patience)} at most."
    else:
        each = [(f"rank {view.rank} for {duration(view.age)}", view) for view in views[:4]]
        title = f"{who}: " + "; ".join(f"{rank}, {where(view)}" for rank, view in each)
        text = f"{who}: " + "; ".join(f"{rank} in step {view.step}, {where(view)}" for rank, view in each)
        text += f". Such phases usually allow {duration(max(view.patience for view in views))} at most."
    return Words(title, f"{text} The stacks show the line.")


def _unclear(verdict: Verdict) -> Words:
    facts, age = verdict.facts, duration(verdict.age)
    facts = facts if isinstance(facts, Unclear) else Unclear("nobody_waits")
    name = collective(facts.collective)
    if facts.why == "entered":
        reason = f"{ranks_in_words(facts.inside)} in {name}, which {ranks_in_words(facts.entered)} entered too"
    else:
        reason = {
            "same_collective": f"every rank is inside {name}: the network, or the collective itself",
            "other_counts": "every rank is inside a collective, but not at the same count",
            "nobody_waits": "no rank is seen to wait for another one",
        }[facts.why]
    return Words(
        f"no progress for {age}, cannot tell which rank: {reason}",
        f"{ranks_in_words(ranks_of(verdict.views.values()))} made no progress for {age}. Cannot tell which rank is "
        f"the cause: {reason}. Compare the stacks of all ranks.",
    )


def _exit(verdict: Verdict) -> Words:
    done = verdict.facts.ranks if isinstance(verdict.facts, OtherRanks) else ()
    example = next((view for view in verdict.views.values() if view.inside), next(iter(verdict.views.values())))
    cannot = ", which a finished rank cannot enter" if example.inside else ""
    others = f"{ranks_in_words(done)} finished, " if done else ""
    left, age = ranks_in_words(tuple(verdict.views)), duration(verdict.age)
    return Words(
        f"hang at exit: {others}{left} still there after {age}",
        f"{others}{left} made no progress for {age} ({where(example)}{cannot}). "
        "The launcher waits forever for such a rank: if the results are saved, kill the run.",
    )


def _wait(ranks: Sequence[Any]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _waiting(ranks: Sequence[int]) -> str:
    return f"{ranks_in_words(ranks)} {_wait(ranks)}"


def _different(found: Difference) -> str:
    sizes = {rank: f" of {call.size:,} elements" if call.size else "" for rank, call in found.calls.items()}
    return _by_words({rank: f"{call.name}{sizes[rank]}" for rank, call in found.calls.items()})


def _ways(words: Mapping[int, str]) -> dict[str, list[int]]:
    ways: dict[str, list[int]] = {}
    for rank, each in words.items():
        ways.setdefault(each, []).append(rank)
    return ways


def _by_words(words: Mapping[int, str]) -> str:
    """Return ``ranks 0 and 1: all_reduce; rank 2: all_gather``."""
    return "; ".join(f"{ranks_in_words(sorted(ranks))}: {each}" for each, ranks in sorted(_ways(words).items()))


def _hang_evidence(finding: Finding) -> dict[str, Any]:
    facts: HangFacts = finding.facts
    verdict, found = facts.verdict, facts.found
    plain: dict[str, Any] = {
        "sure": verdict.sure,
        "since": facts.since,
        "age_s": round(verdict.age, 1),
        "collective": collective(verdict.collective),
        "hung": list(verdict.hung[:RANKS_LISTED]),
        "waiting": list(verdict.waiting[:RANKS_LISTED]),
        "where": {str(rank): where(view) for rank, view in list(verdict.views.items())[:RANKS_LISTED]},
    }
    if (cause := cause_of(verdict)) is not None:
        plain["cause"] = cause.kind
    if verdict.contradicted:
        plain["contradicted"] = True
    if verdict.differs:
        plain["differs"] = list(verdict.differs[:RANKS_LISTED])
    first = [rank for rank in (*verdict.hung, *verdict.differs, *verdict.waiting) if rank in found]
    listed = list(dict.fromkeys([*first, *sorted(found)]))[:RANKS_LISTED]
    if listed:
        plain["ranks"] = {str(rank): _plain(found[rank]) for rank in listed}
        plain["groups"] = _groups(found)
    return plain | ({"launcher": facts.launcher} if facts.launcher else {})


def _groups(found: Mapping[int, Evidence]) -> list[str]:
    """Return the positions of all ranks, one line per distinct position, the largest group first."""
    ways = _ways({rank: found[rank].place.text or "no stack" for rank in sorted(found)})
    return [f"{ranks_in_words(ranks)}: {text}" for text, ranks in sorted(ways.items(), key=lambda one: -len(one[1]))]


def _plain(evidence: Evidence) -> dict[str, Any]:
    calls = evidence.calls.recent
    names = [f"{call.name} #{call.number} of group {call.group}" for call in calls]
    frames = evidence.frames[:STACK_LINES]
    found = {
        "taken": evidence.taken,
        "stacks_by": evidence.by or "none",
        "at": evidence.place.text if frames else None,
        "stack": [f"{frame.place} in {frame.function}" for frame in frames] or None,
        "process_state": evidence.process or None,
        "kernel_function": evidence.wchan or None,
        "asleep_s": round(evidence.asleep, 1) if evidence.asleep else None,
        "stands_s": round(evidence.stands, 1) if evidence.stands else None,
        "wakes_in_s": round(evidence.wakes, 1) if evidence.wakes is not None else None,
        "process_tree": evidence.work or None,
        "nothing_done_s": round(evidence.quiet, 1) if evidence.quiet else None,
        "waits_for_lock": evidence.lock.path if evidence.lock is not None else None,
        "lock_held_by": (evidence.lock.holder or None) if evidence.lock is not None else None,
        "device_utilization_percent": evidence.utilization,
        "last_collective": names[-1] if names else None,
        "unfinished": [name for name, call in zip(names, calls, strict=True) if call.done is False][:4] or None,
    }
    return {name: value for name, value in found.items() if value is not None}


_SHOWN: dict[str, Shown] = {
    "since": Shown("since", "moment"),
    "age_s": Shown("no progress for", "s"),
    "waiting_s": Shown("waiting for", "s"),
    "hung": Shown("ranks that hang"),
    "waiting": Shown("ranks that wait"),
    "differs": Shown("ranks that differ"),
    "generating": Shown("in generation"),
    "contradicted": Shown("NCCL's own counters differ"),
    "where": Shown("where", by="rank"),
    "ranks": Shown("ranks", by="rank"),
    "groups": Shown("all ranks"),
    "taken": Shown("looked at", "moment"),
    "kernel_function": Shown("in the kernel's"),
    "asleep_s": Shown("asleep for", "s"),
    "stands_s": Shown("stands there for", "s"),
    "process_tree": Shown("its processes"),
    "nothing_done_s": Shown("nothing done for", "s"),
    "waits_for_lock": Shown("waits for the lock"),
    "lock_held_by": Shown("which is held by"),
    "device_utilization_percent": Shown("device utilization", "%"),
    "unfinished": Shown("unfinished collectives"),
    "cause": HIDDEN,
}

KINDS = (
    Kind(
        "hang",
        HangFacts,
        lambda facts, _: of_verdict(facts.verdict),
        "hang",
        evidence=_hang_evidence,
        shown=_SHOWN,
        resolved={
            "resumed": "It resolved after {1}.",
            "run_ended": "It ended with the run, after {1}.",
            "superseded": "The evidence has changed: see the next alert.",
        },
        restore=lambda alert: Since(float(alert.evidence.get("since", alert.time))),
        counted=True,
    ),
    Kind(
        "stopped",
        StoppedFacts,
        _stopped,
        "hang",
        "stopped",
        evidence=lambda finding: {"pid": finding.facts.pid, "process_state": "t" if finding.facts.traced else "T"},
        resolved={"resumed": "It runs again.", "rank_ended": "Its process is gone."},
        added={WaitingRanks: lambda facts: Added("awaited", {"waiting": list(facts.waiting[:RANKS_LISTED])})},
        counted=True,
    ),
    Kind(
        "unreachable",
        UnreachableFacts,
        _is_unreachable,
        "note",
        "unreachable",
        evidence=lambda finding: {"ranks": list(finding.ranks[:RANKS_LISTED])},
        resolved={"resumed": "It reports again, or ended."},
    ),
)
