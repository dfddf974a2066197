"""What the hub itself finds: rules and evidence stay as scripts and recordings know them, words come from here."""

from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.findings.alerts import AlertStore
from ftmon.protocol.analysis.findings.finding import Finding
from ftmon.protocol.analysis.hub_facts import (
    ConcurrentJobFacts,
    DamagedRecordingFacts,
    HangActionFacts,
    JobFailedFacts,
    LateExit,
    LeftoverFacts,
    LeftProcess,
    MissingRanksFacts,
    NoStepFacts,
    NotListeningFacts,
    NotNotifiedFacts,
    PortFacts,
    RefusedFacts,
    RemovedRecordingFacts,
    RestartFacts,
    UnhookedFacts,
    UnprovenHangFacts,
)
from ftmon.protocol.analysis.kinds import FindingAlerts
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.judge import OtherRanks, Verdict
from ftmon.protocol.analysis.words import Words

VERDICT = Verdict(
    "unreachable", (0,), (), False, 10.0, views={0: RankView(0, 1, "backward", 9.0, 8.0)}, facts=OtherRanks((1,))
)
ASLEEP = LeftProcess(7, "python", "D", "nfs_wait")


@pytest.mark.parametrize(
    ("kind", "key", "facts", "rule", "evidence", "title"),
    [
        (
            *("messages_refused", "a peer", RefusedFacts("a peer", "version 2.0")),
            *(("note", "refused a peer"), {}, "messages of a peer are refused"),
        ),
        (
            *("not_notified", "exit 7", NotNotifiedFacts("exit 7", "exit status 7")),
            *(("note", "notify exit 7"), {}, "not notified: exit 7: exit status 7"),
        ),
        (
            *("hub_restarted", "", RestartFacts(5.0, 2.0)),
            *(("note", "restarted"), {"last_recorded": 5.0}, "the hub was restarted"),
        ),
        (
            *("recording_damaged", "", DamagedRecordingFacts("malformed", "aside.sqlite")),
            *(("disk", "damaged"), {}, "the recording was damaged"),
        ),
        (
            *("recording_removed", "", RemovedRecordingFacts("it was removed")),
            *(("disk", "removed"), {}, "the recording was removed"),
        ),
        (
            *("not_listening", "", NotListeningFacts("port 1 cannot be used")),
            *(("note", "listen"), {}, "not listening for other hosts"),
        ),
        (
            *("missing_ranks", "", MissingRanksFacts([1], 2, "0.0.0.0:7420")),
            *(("note", "unheard"), {"missing": [1]}, "1 of 2 ranks have not reported"),
        ),
        (
            *("unhooked", "", UnhookedFacts(42, None)),
            *(("note", "unhooked"), {"pid": 42}, "not watched: pid 42 was started without PYTHONPATH"),
        ),
        (
            *("no_step", "", NoStepFacts("exit code 1", 1, 2, last_lines=["start"])),
            *(("exit", "before_first_step"), {"exit_code": 1, "ranks": 2, "last_lines": ["start"]}),
            "ended without a recorded step: its ranks reported, but no finished optimizer step was received from them",
        ),
        (
            *("no_step", "", NoStepFacts("exit code 1", 1, 1, "KeyError: 'labels'", 2, "train.py:9")),
            ("exit", "before_first_step"),
            {"error": "KeyError: 'labels'", "error_rank": 2, "error_place": "train.py:9"},
            "ended before its first step: KeyError: 'labels'",
        ),
        (
            *("no_step", "", NoStepFacts("exit code 1", 1, 0, unhooked=UnhookedFacts(42, "."))),
            *(
                ("exit", "before_first_step"),
                {"pid": 42},
                "ended without a recorded step: no rank reported; pid 42 was",
            ),
        ),
        (
            *("port_taken", "29500", PortFacts(29500, 0, "EADDRINUSE", 9, "anna", "python train.py")),
            ("failure", "port 29500"),
            {"port": 29500, "pid": 9, "user": "anna", "command": "python train.py"},
            "port 29500 is taken by python train.py (pid 9, user anna)",
        ),
        (
            *("port_taken", "0", PortFacts(0, -1, "EADDRINUSE")),
            ("failure", "port 0"),
            {"port": 0, "pid": None, "user": None, "command": None},
            "a port is taken",
        ),
        (
            *("job_failed", "2", JobFailedFacts(2, "exit code 1")),
            *(("failure", "job 2"), {}, "job 2 failed: exit code 1"),
        ),
        (
            *("concurrent_job", "2", ConcurrentJobFacts(2, 1, 0, ["train.py"])),
            *(("note", "beside 2"), {"command": ["train.py"]}, "job 2 runs at the same time as job 1"),
        ),
        (
            *("leftover_processes", "", LeftoverFacts([ASLEEP], {7: 2**30})),
            *(("note", "leftover"), {"pids": [7], "gpu_bytes": {7: 2**30}}, "1 process of the run could not be ended"),
        ),
        (
            *(
                "hang_action",
                "",
                HangActionFacts("kill", "--exit-timeout 60", LateExit(1, 4, 60.0, [2, 3]), "/run/s.txt"),
            ),
            ("note", "on-hang"),
            {},
            "ending the run (--exit-timeout 60): 1 of 4 ranks finished, and ranks 2 and 3 were still running 1 m 00 s",
        ),
        (
            *("unproven_hang", "", UnprovenHangFacts("--on-hang kill", "the host is cut off", VERDICT)),
            *(("note", "on-hang-proof"), {}, "--on-hang kill waits for proof: the host is cut off"),
        ),
    ],
)
def test_a_finding_of_the_hub_is_the_alert_that_it_has_always_been(
    kind: str, key: str, facts: Any, rule: tuple[str, str], evidence: dict[str, Any], title: str
) -> None:
    (alert,) = FindingAlerts(AlertStore()).put(10.0, [Finding(kind, facts, key=key)])
    assert (alert.kind, alert.evidence["rule"]) == rule
    assert alert.evidence.items() >= evidence.items()
    assert alert.title.startswith(title)
    assert not alert.ranks


def test_two_ports_are_two_alerts_and_one_port_is_one() -> None:
    alerts = FindingAlerts(AlertStore())
    found = [Finding("port_taken", PortFacts(port, 0, "EADDRINUSE"), key=str(port)) for port in (1, 2, 1)]
    assert [alert.id for alert in alerts.put(10.0, found)] == [1, 2]


def test_a_holder_that_cannot_be_inspected_and_the_default_port() -> None:
    said = kinds.words_of(Finding("port_taken", PortFacts(29500, -1, "EADDRINUSE", 0, "anna", "")))
    assert said.title == "port 29500 is taken by a process of user anna whose details need root (ss -ltnp)"
    assert said.text.startswith("The launcher could not listen there: EADDRINUSE. 29500 is the launchers' default")
    assert not said.remedy.endswith("kill 0.")


def no_step(ranks: int, **more: Any) -> Words:
    return kinds.words_of(Finding("no_step", NoStepFacts("exit code 1", 1, ranks, **more)))


def test_ranks_without_a_step_may_have_trained_in_processes_that_they_started() -> None:
    said = no_step(2)
    assert said.title == (
        "ended without a recorded step: its ranks reported, but no finished optimizer step was received from them"
    )
    assert said.text == (
        "Its ranks reported, but no finished optimizer step was received from them (exit code 1). The script may have "
        "ended before its first step. Steps of other processes that a rank started are not recorded. Ranks that are "
        "killed lose up to a tenth of a second of steps."
    )
    assert not said.remedy


@pytest.mark.parametrize(
    ("ranks", "rank", "place", "body"),
    [
        (
            *(1, 2, ""),
            "Its ranks reported, and none finished an optimizer step (exit code 1). rank 2: KeyError: 'labels'",
        ),
        (
            *(0, None, "train.py:9"),
            "No rank reported; none finished an optimizer step (exit code 1). its output: KeyError: 'labels', raised "
            "at train.py:9",
        ),
    ],
)
def test_an_exception_before_the_first_step_is_named_with_who_raised_it(
    ranks: int, rank: int | None, place: str, body: str
) -> None:
    said = no_step(ranks, error="KeyError: 'labels'", error_rank=rank, error_place=place)
    assert said[:3] == ("ended before its first step: KeyError: 'labels'", body, "")


@pytest.mark.parametrize(("rank", "who"), [(None, "it"), (3, "rank 3")])
def test_the_last_line_of_a_run_without_a_rank_is_in_its_title(rank: int | None, who: str) -> None:
    line = "no data at /nowhere"
    said = no_step(0, last_line=line, last_line_rank=rank, last_lines=["start", line])
    assert said.title == f"ended without a recorded step: no rank reported; the last line that {who} wrote: {line}"
    assert said.text == "No rank reported (exit code 1). ftmon saw no DeepSpeed engine and no PyTorch optimizer in it."
    assert said.remedy == "The last lines of its output may show the cause."


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        (
            ".",
            "pid 42 was started with PYTHONPATH=., so without ftmon's import hook; use PYTHONPATH=.:$PYTHONPATH",
        ),
        (
            None,
            "pid 42 was started without PYTHONPATH, so without ftmon's import hook; leave PYTHONPATH as it is",
        ),
    ],
)
def test_a_run_without_a_rank_names_the_process_that_was_not_watched(path: str | None, cause: str) -> None:
    said = no_step(0, unhooked=UnhookedFacts(42, path))
    assert said.title == f"ended without a recorded step: no rank reported; {cause}"
    assert said.text == (
        f"No rank reported: {cause} (exit code 1). The hook is a folder on PYTHONPATH, which the command has replaced; "
        "the process and what it starts are not recorded."
    )


def test_leftovers_are_named_with_what_they_wait_for_and_hold() -> None:
    said = kinds.words_of(Finding("leftover_processes", LeftoverFacts([ASLEEP], {7: 2**30})))
    assert "pid 7 (python) is in uninterruptible sleep in nfs_wait: it ends when the kernel returns" in said.title
    assert "They hold 1.00 GiB of GPU memory." in said.text
