"""Stalls in words: each verdict, where a rank is, what a look at it found, and how a stall ended."""

from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.finding import Condition, Finding, Resolution, ResolvedWhy, added, resolved
from ftmon.protocol.analysis.stalls.collectives import Difference, RankView, collective, where
from ftmon.protocol.analysis.stalls.evidence import Call, Calls, Collective, Evidence, Frame, LockWait
from ftmon.protocol.analysis.stalls.evidence import where as place_of
from ftmon.protocol.analysis.stalls.hang_detector import HangFacts, StoppedFacts, UnreachableFacts, WaitingRanks
from ftmon.protocol.analysis.stalls.judge import CircularWait, OtherRanks, RanAhead, StaleLocks, Unclear, Verdict
from ftmon.protocol.analysis.stalls.words import of_verdict
from ftmon.protocol.messages.control import Alert

FRAMES = (Frame("/home/me/train.py", 52, "main"),)
REDUCE = Collective("all_reduce", 9)
IN_REDUCE = "inside all_reduce #9"


def view(rank: int, **fields: Any) -> RankView:
    return RankView(**{"rank": rank, "step": 12, "phase": "backward", "age": 10.0, "limit": 8.0, **fields})


def verdict(kind: Any, waiting: tuple[int, ...] = (), hung: tuple[int, ...] = (), **fields: Any) -> Verdict:
    views = {each.rank: each for each in fields.pop("of", [view(rank) for rank in (*hung, *waiting)])}
    return Verdict(kind, waiting, hung, True, 10.0, views=views, **fields)


def inside(rank: int, name: str) -> RankView:
    return view(rank, inside=name)


SHAPES = Difference("0", 9, {r: Call("0", 9, "all_reduce", 32 if r == 2 else 64, False) for r in range(3)}, True)
CIRCLE = CircularWait({0: Collective("all_reduce", 4, (0, 1), "1"), 1: Collective("x", 3, (), "2")})


def found(**fields: Any) -> Evidence:
    return Evidence(1.0, "probe", FRAMES, place_of(FRAMES), **fields)


@pytest.mark.parametrize(
    ("verdict", "title", "body"),
    [
        (
            verdict("missing", (0, 1), (2,), collective=REDUCE, of=[view(2, phase="data"), view(0), view(1, age=12.0)]),
            "rank 2 is in data loading, and has not entered all_reduce #9; ranks 0 and 1 wait 12 s",
            "ranks 0 and 1 wait 12 s in all_reduce #9, held up by rank 2: in data loading. The stacks of rank 2 show "
            "the line. The wait ends only if rank 2 continues.",
        ),
        (
            verdict("missing", (0,), (1, 2), of=[view(1, absent="stopped"), view(2, absent="gone"), view(0)]),
            "ranks 1 and 2: rank 1: stopped by a signal; rank 2: process gone; rank 0 waits 10 s",
            "rank 0 waits 10 s, held up by ranks 1 and 2: rank 1: stopped by a signal; rank 2: process gone. The "
            "stacks of ranks 1 and 2 show the line. The wait ends only if ranks 1 and 2 continue.",
        ),
        (
            verdict("ahead", (0,), (1,), collective=REDUCE, facts=RanAhead(61, 42), of=[view(0)]),
            "rank 1 skips collectives and ran ahead; rank 0 waits 10 s in all_reduce #9",
            "rank 1 reached step 61 without entering all_reduce #9, in which rank 0 waits in step 42. That collective "
            "can never complete, and the ranks' parameters differ from then on. Check for a condition that differs "
            "between ranks: no_sync(), an accumulation boundary, a skipped backward.",
        ),
        (
            verdict("lock", (0,), facts=StaleLocks(("/c/x y/lock", "/c/z/lock"))),
            "rank 0 waits for the build lock /c/x y/lock and 1 more, and no compiler runs",
            "rank 0 waits 10 s for the lock of a PyTorch extension's build. No compiler runs and no file beside "
            "the lock has changed lately: a build that was killed left it behind. Remove it: rm '/c/x y/lock' "
            "/c/z/lock; the ranks then continue by themselves.",
        ),
        (
            verdict("alone", (), (0,), of=[view(0, phase="forward")]),
            "rank 0 made no progress for 10 s, in forward",
            "rank 0 made no progress for 10 s in step 12, in forward; that phase usually allows 8.0 s at most. The "
            "stacks show the line.",
        ),
        (
            verdict("alone", (), (1, 2), of=[view(1, phase="forward", age=40.0), view(2, phase="data", age=90.0)]),
            "ranks 1 and 2 made no progress: rank 2 for 1 m 30 s, in data loading; rank 1 for 40 s, in forward",
            "ranks 1 and 2 made no progress: rank 2 for 1 m 30 s in step 12, in data loading; rank 1 for 40 s in step "
            "12, in forward. Such phases usually allow 8.0 s at most. The stacks show the line.",
        ),
        (
            verdict("mismatch", (0, 1, 2), collective=Collective("", 9, (0, 1, 2)), differs=(2,), facts=SHAPES),
            "mismatched shapes for 10 s: rank 2: all_reduce of 32 elements; ranks 0 and 1: all_reduce of 64 elements",
            "Collective #9 of the group of ranks 0, 1 and 2 was not entered alike: rank 2: all_reduce of 32 elements; "
            "ranks 0 and 1: all_reduce of 64 elements. rank 2 differs from the others. They wait for each other "
            "forever. Check for sizes that differ between ranks.",
        ),
        (
            verdict(
                "mismatch", (0, 1), collective=Collective("", 9), of=[inside(0, "all_gather"), inside(1, "barrier")]
            ),
            "mismatched collectives for 10 s: rank 0: all_gather; rank 1: barrier",
            "Every rank is inside its collective #9, but not the same one (rank 0: all_gather; rank 1: barrier). They "
            "wait for each other forever. Check for code that takes another branch on some ranks.",
        ),
        (
            verdict("mismatch", (0, 1), collective=REDUCE, facts=OtherRanks((0,)), of=[inside(0, "recv"), view(1)]),
            "mismatched calls for 10 s: rank 0: recv; rank 1: all_reduce #9",
            "rank 0 waits in recv for another rank, and rank 1 in all_reduce for rank 0. Check for a send without a "
            "matching receive, or a branch that only some ranks take.",
        ),
        (
            verdict("deadlock", (0, 1), facts=CIRCLE),
            "deadlock of process groups for 10 s: rank 0 waits in all_reduce #4 of group 1 (ranks 0 and 1); rank 1 "
            "waits in x #3 of group 2",
            "rank 0 waits in all_reduce #4 of group 1 (ranks 0 and 1); rank 1 waits in x #3 of group 2. Each waits for "
            "a rank that waits in another group, so none can continue. Have all ranks enter the collectives of their "
            "groups in the same order.",
        ),
        (
            verdict("unreachable", (0,), collective=REDUCE, facts=OtherRanks((2, 3))),
            "rank 0 waits 10 s in all_reduce #9: the host of ranks 2 and 3 is cut off",
            "rank 0 waits 10 s in all_reduce #9. No message arrives from the host of ranks 2 and 3, so the state of "
            "its ranks is unknown. Once the link is restored, the training may continue by itself.",
        ),
        (
            verdict("unclear", (0, 1), facts=Unclear("entered", REDUCE, (0,), (1,))),
            "no progress for 10 s, cannot tell which rank: rank 0 in all_reduce #9, which rank 1 entered too",
            "ranks 0 and 1 made no progress for 10 s. Cannot tell which rank is the cause: rank 0 in all_reduce #9, "
            "which rank 1 entered too. Compare the stacks of all ranks.",
        ),
        (
            verdict("exit", (1,), (2,), facts=OtherRanks((0,)), of=[view(2), view(1, inside="barrier", collectives=3)]),
            "hang at exit: rank 0 finished, ranks 2 and 1 still there after 10 s",
            "rank 0 finished, ranks 2 and 1 made no progress for 10 s (inside barrier #3, which a finished rank cannot "
            "enter). The launcher waits forever for such a rank: if the results are saved, kill the run.",
        ),
    ],
)
def test_a_verdict_in_words(verdict: Verdict, title: str, body: str):
    assert of_verdict(verdict)[:2] == (title, body)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Unclear("same_collective", REDUCE), f"every rank is {IN_REDUCE}: the network, or the collective itself"),
        (Unclear("other_counts"), "every rank is inside a collective, but not at the same count"),
        (Unclear("nobody_waits"), "no rank is seen to wait for another one"),
    ],
)
def test_why_nothing_can_be_told_in_words(facts: Unclear, reason: str):
    title = of_verdict(verdict("unclear", (0,), facts=facts)).title
    assert title == f"no progress for 10 s, cannot tell which rank: {reason}"


def test_a_collective_with_its_count_and_group_and_where_a_rank_is_in_words():
    assert collective(None) == ""
    assert collective(Collective("barrier", None)) == "barrier"
    assert collective(Collective("", 9, (0, 1))) == "#9 of the group of ranks 0 and 1"
    assert collective(Collective("x", 0, (0,), "5")) == "x #0 of group 5 (rank 0)"
    line = "train.py:52 in main"
    held = found(lock=LockWait("/c/lock", holder="pid 7"))
    assert where(view(0, phase="forward", evidence=found())) == f"in forward: {line}"
    assert where(view(0, inside="barrier", collectives=3)) == "inside barrier #3"
    assert where(view(0, evidence=held)) == f"in backward: {line}, waits for the lock /c/lock held by pid 7"
    native = f"in backward, in native code that holds the GIL: {line}"
    assert where(view(0, absent="silent", evidence=found())) == native
    assert where(view(0, absent="silent")) == "process alive, but sends nothing"


def test_a_hangs_evidence_has_what_a_look_at_the_ranks_found():
    calls = Calls("recorder", (Call("0", 8, "broadcast", 4, True), Call("0", 9, "all_reduce", 4, False)))
    looked = {1: found(calls=calls, process="S", asleep=3.04, lock=LockWait("/c/lock")), 0: found()}
    facts = HangFacts(5.0, verdict("missing", (0,), (1,), collective=REDUCE), looked, "asleep")
    evidence = kinds.evidence_of(Finding("hang", facts, ranks=(1,), rank=1, key="missing"))
    assert evidence["where"] == {"1": "in backward", "0": "in backward"}
    assert (evidence["since"], evidence["age_s"], evidence["collective"]) == (5.0, 10.0, "all_reduce #9")
    assert (evidence["hung"], evidence["waiting"], evidence["launcher"]) == ([1], [0], "asleep")
    assert evidence["groups"] == ["ranks 0 and 1: train.py:52 in main"]
    assert evidence["ranks"]["1"] == {
        "taken": 1.0,
        "stacks_by": "probe",
        "at": "train.py:52 in main",
        "stack": ["train.py:52 in main"],
        "process_state": "S",
        "asleep_s": 3.0,
        "waits_for_lock": "/c/lock",
        "last_collective": "all_reduce #9 of group 0",
        "unfinished": ["all_reduce #9 of group 0"],
    }
    alert = Alert(1, "hang", "error", 9.0, "", evidence=evidence)
    assert kinds.KINDS["hang"].facts_of(alert).since == 5.0, "and a hub that is restarted goes on from there"


def test_a_rank_that_is_stopped_or_not_heard_of_in_words():
    for facts, title, state in (
        (StoppedFacts(101, False), "stopped by a signal (SIGSTOP)", "T"),
        (StoppedFacts(101, True), "traced by a debugger", "t"),
    ):
        stopped = Finding("stopped", facts, rank=1, ranks=(1,))
        words = kinds.words_of(stopped)
        assert words.title == f"rank 1 is {title}"
        assert ("'kill -CONT 101' continues it" in words.text) is not facts.traced, "it would stay stopped"
        assert kinds.evidence_of(stopped) == {"pid": 101, "process_state": state}
        assert kinds.added_of(added(stopped.condition, WaitingRanks((0, 2)))) == ("awaited", {"waiting": [0, 2]}, "")
    unheard = Finding("unreachable", UnreachableFacts("nothing heard of it"), ranks=(1, 2))
    assert kinds.words_of(unheard).title == "ranks 1 and 2 unreachable: nothing heard of it"
    assert kinds.evidence_of(unheard) == {"ranks": [1, 2]}


@pytest.mark.parametrize(
    ("kind", "why", "words"),
    [
        ("hang", "resumed", "It resolved after 12 s."),
        ("hang", "run_ended", "It ended with the run, after 12 s."),
        ("hang", "superseded", "The evidence has changed: see the next alert."),
        ("stopped", "resumed", "It runs again."),
        ("stopped", "rank_ended", "Its process is gone."),
        ("unreachable", "resumed", "It reports again, or ended."),
    ],
)
def test_how_a_stall_ended_in_words(kind: Any, why: ResolvedWhy, words: str):
    assert kinds.resolution_of(resolved(Condition(kind), Resolution(why, 12.0))) == words
