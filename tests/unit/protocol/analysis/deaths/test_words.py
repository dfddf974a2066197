"""Failures, deaths and out-of-memory errors in words: what each finding is called, and what is added to it later."""

from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.deaths import detector
from ftmon.protocol.analysis.findings.finding import Condition, Finding, added
from ftmon.protocol.analysis.oom.detector import Released, Uncaught
from ftmon.protocol.messages.hosts import KernelKill

GIB = 2**30
GLOO = "RuntimeError: op.preamble.length <= op.nbytes"
GONE = "The other ranks cannot continue without it; launchers end them too."
REMEDY = "Give it more memory (the limit, the host), or hold less: fewer workers, smaller batches, no offload."


def body(end: str, hint: str = "", then: str = GONE) -> str:
    return " ".join(filter(None, (f"The process of rank 1 (pid 101) is gone: {end}.", hint, then)))


def death(code: int | None = None, signal: int | None = None, **more: Any) -> Finding:
    return Finding(
        "died", detector.ProcessDeath(101, code, signal, more.pop("state", ""), [], **more), rank=1, ranks=(1,)
    )


@pytest.mark.parametrize(
    ("finding", "title", "text"),
    [
        (death(3, state="sys.exit(3)"), "rank 1 ended: exit code 3", body("sys.exit(3)")),
        (death(3, alone=True), "rank 1 ended: exit code 3", body("exit code 3", then="")),
        (death(-11), "rank 1 killed by SIGSEGV", body("killed by SIGSEGV", "Possibly: a crash in native code.")),
        (
            death(-6),
            "rank 1 killed by SIGABRT",
            "The process of rank 1 (pid 101) is gone: killed by SIGABRT. Possibly: native code aborted: an assertion, "
            f"or NCCL's watchdog after a timeout. {GONE}",
        ),
        (
            death(-6, reason="ring.cc:12: reduce: Assertion `size > 0' failed"),
            "rank 1 aborted: ring.cc:12: reduce: Assertion `size > 0' failed",
            body("killed by SIGABRT"),
        ),
        (
            death(-6, reason="gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4", generating=True),
            "rank 1 aborted in generate: gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 8 vs 4",
            "The process of rank 1 (pid 101) is gone: killed by SIGABRT. Gloo aborted because ranks entered one "
            f"collective with tensors of different sizes (shapes). {GONE} Under ZeRO-3 and FSDP each forward of a "
            "generation is a collective, and a rank whose texts end early leaves the others alone in it: pass "
            "synced_gpus=True to generate.",
        ),
        (death(signal=9, asked=True), "rank 1 killed by SIGKILL, as asked", body("killed by SIGKILL")),
        (
            death(signal=9, kernel_kill=KernelKill(True, "host", "python", 8 * GIB, [], resident_bytes=7 * GIB)),
            "rank 1 killed by SIGKILL by the kernel: out of memory",
            "The process of rank 1 (pid 101) is gone: killed by SIGKILL. The host's memory was exhausted: the kernel "
            "log records the kill of pid 101 (python), 8.00 GiB; its resident memory was 7.00 GiB at the last sample. "
            f"{REMEDY} {GONE}",
        ),
        (
            death(signal=9, kernel_kill=KernelKill(False, "group", limits_bytes=[GIB], kills=3, recent_kills=1)),
            "rank 1 killed by SIGKILL, probably by the kernel: out of memory",
            "The process of rank 1 (pid 101) is gone: killed by SIGKILL. Its control group's limit was exhausted: "
            "its control group counts 3 out-of-memory kills, 1 of them just before; the group may use 1.00 GiB. "
            f"{REMEDY} {GONE}",
        ),
        (
            death(signal=9, kernel_kill=KernelKill(False)),
            "rank 1 killed by SIGKILL",
            "The process of rank 1 (pid 101) is gone: killed by SIGKILL. Not by the kernel's OOM killer: the kernel "
            f"log has no out-of-memory kill of this process. A person or a job scheduler sent it. {GONE}",
        ),
        (
            death(signal=9, pressure=detector.HostPressure(1.25, 31 * GIB, 32 * GIB, 8 * GIB)),
            "rank 1 killed by SIGKILL, probably by the kernel: out of memory",
            "The process of rank 1 (pid 101) is gone: killed by SIGKILL. Neither log nor counter could be read; "
            "1.2 s before, 31.00 GiB of 32.00 GiB of the host's (or control group's) memory were in use, 8.00 GiB of "
            f"it by this rank. {GONE}",
        ),
        (
            Finding("launcher_ended", detector.LauncherEnded(None, 2, ["100 (python)"])),
            "the job's command ended (never began) before its ranks",
            "The command that was started (never began) left 2 processes behind. ftmon ended the remaining processes; "
            "no rank is the cause.",
        ),
        (
            Finding("failure", detector.ScriptFailure(GLOO, "", []), rank=0, step=7, phase="backward"),
            f"rank 0 failed in backward: {GLOO}",
            f"An exception ended the script in step 7: {GLOO}. Gloo aborted because ranks entered one collective with "
            "tensors of different sizes (shapes).",
        ),
        (
            Finding("failure", detector.ScriptFailure("closed\nmore", "", [], True), rank=0, step=7),
            "rank 0 failed, its peer killed as asked: closed",
            "An exception ended the script in step 7: closed.",
        ),
        (
            Finding("ended_early", detector.EndedEarly({0: 5, 2: 6}, 1, "closed by peer", "", []), step=7),
            "ranks 0 and 2 ended early, after steps 5 to 6; rank 1 lost the connection in step 7",
            "The script of ranks 0 and 2 ended without an error after steps 5 to 6, while rank 1 continued and "
            "communicated with it in step 7: closed by peer. Give every rank the same number of batches "
            "(DistributedSampler, drop_last, torch.distributed.algorithms.Join), and end with a barrier.",
        ),
        (
            Finding("oom_failure", Uncaught("MemoryError: no", ""), rank=2, step=4, phase="data"),
            "rank 2 out of memory in data: MemoryError: no",
            "MemoryError: no. The script did not catch it and failed in step 4. Use a smaller micro-batch with more "
            "accumulation, gradient checkpointing, or a higher ZeRO stage.",
        ),
    ],
)
def test_a_death_and_a_failure_in_words(finding: Finding, title: str, text: str):
    words = kinds.words_of(finding)
    assert words.title == title
    assert " ".join(filter(None, (words.text, words.remedy))) == text


@pytest.mark.parametrize(
    ("facts", "evidence", "sentence"),
    [
        (detector.Ended(1, None), {"ended": "exit code 1"}, "It ended: exit code 1."),
        (detector.Ended(None, None), {"ended": "exit status unknown"}, ""),
        (detector.LastLog(["a"]), {"log": ["a"]}, ""),
        (
            detector.Followed(
                {
                    3: detector.Follower(0.5, ["closed by peer\nmore", detector.Ended(None, 15)]),
                    2: detector.Follower(1, [detector.Ended(None, None)]),
                }
            ),
            {
                "then": {
                    "3": "closed by peer after 500 ms, then killed by SIGTERM",
                    "2": "exit status unknown after 1.0 s",
                }
            },
            "",
        ),
        (Uncaught("E", "T"), {"error": "E", "traceback": "T"}, "The script did not catch it and failed."),
        (Released(), {"held": False}, "It was released."),
    ],
)
def test_what_becomes_known_later_in_words(facts: Any, evidence: dict[str, Any], sentence: str):
    assert kinds.added_of(added(Condition("failure", 0), facts))[1:] == (evidence, sentence)


def test_the_evidence_of_a_death_is_plain():
    kill = KernelKill(True, "host", "python", GIB)
    assert kinds.evidence_of(death(signal=9, kernel_kill=kill, pressure=detector.HostPressure(1.0, GIB, GIB, GIB))) == {
        "pid": 101,
        "exit_code": None,
        "signal": 9,
        "log": [],
        "kernel_kill": {
            "sure": True,
            "exhausted": "host",
            "name": "python",
            "killed_bytes": GIB,
            "text": "the host's memory was exhausted",
            "why": ["the kernel log records the kill of pid 101 (python), 1.00 GiB"],
        },
        "memory_before": "1.0 s before, 1.00 GiB of 1.00 GiB of the host's (or control group's) memory were in use, "
        "1.00 GiB of it by this rank",
    }
    launcher = Finding("launcher_ended", detector.LauncherEnded(-9, 2, ["100 (python)", "101 (python)"]))
    expected = {"ended": "killed by SIGKILL", "left": 2, "processes": "100 (python), 101 (python)"}
    assert kinds.evidence_of(launcher) == expected


@pytest.mark.parametrize(
    "error",
    [
        "SystemExit: " + "an explanation, " * 25 + "so",
        "RuntimeError: an illegal memory access was encountered.",
        "KeyError: 'ids'",
    ],
)
def test_an_error_ends_with_one_full_stop(error: str) -> None:
    failure = Finding("failure", detector.ScriptFailure(error, "", []), rank=0, step=7)
    uncaught = Finding("oom_failure", Uncaught(error, ""), rank=0, step=7)
    ended = error.rstrip(".") + "."
    assert kinds.words_of(failure).title == f"rank 0 failed: {error}", "whole"
    assert kinds.words_of(failure).text.startswith(f"An exception ended the script in step 7: {ended}")
    assert kinds.words_of(uncaught).text.startswith(f"{ended} The script did not catch it")
    assert ".." not in kinds.words_of(failure).text + kinds.words_of(uncaught).text
