"""What the hub itself finds: rules and evidence stay as scripts and recordings know them, words come from here."""

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
from ftmon.protocol.analysis.kinds import KINDS, FindingAlerts
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.judge import OtherRanks, Verdict

VERDICT = Verdict(
    "unreachable", (0,), (), False, 10.0, views={0: RankView(0, 1, "backward", 9.0, 8.0)}, facts=OtherRanks((1,))
)
ASLEEP = LeftProcess(7, "python", "D", "nfs_wait")


HANG = HangActionFacts("kill", "--exit-timeout 60", LateExit(1, 4, 60.0, [2, 3]), "/run/s.txt")
RAISED = NoStepFacts("exit code 1", 1, 1, "KeyError: 'labels'", 2, "train.py:9")
REPORTED = "its ranks reported, but no finished optimizer step was received from them"
TAKEN = {"port": 29500, "pid": 9, "user": "anna", "command": "python train.py"}


@pytest.mark.parametrize(
    ("facts", "kind", "rule", "evidence", "title"),
    [
        (RefusedFacts("a peer", "version 2.0"), "note", "refused a peer", {}, "messages of a peer are refused"),
        (NotNotifiedFacts("exit 7", "status 7"), "note", "notify exit 7", {}, "not notified: exit 7: status 7"),
        (RestartFacts(5.0, 2.0), "note", "restarted", {"last_recorded": 5.0}, "the hub was restarted"),
        (DamagedRecordingFacts("malformed", "aside.sqlite"), "disk", "damaged", {}, "the recording was damaged"),
        (RemovedRecordingFacts("it was removed"), "disk", "removed", {}, "the recording was removed"),
        (NotListeningFacts("port 1 cannot be used"), "note", "listen", {}, "not listening for other hosts"),
        (MissingRanksFacts([1], 2, "0.0.0.0:7420"), "note", "unheard", {"missing": [1]}, "1 of 2 ranks have not"),
        (
            UnhookedFacts(42, None), "note", "unhooked", {"pid": 42},
            "not watched: pid 42 was started without PYTHONPATH",
        ),
        (
            *(NoStepFacts("exit code 1", 1, 2, last_lines=["start"]), "exit", "before_first_step"),
            *({"exit_code": 1, "ranks": 2, "last_lines": ["start"]}, f"ended without a recorded step: {REPORTED}"),
        ),
        (
            *(RAISED, "exit", "before_first_step"),
            {"error": "KeyError: 'labels'", "error_rank": 2, "error_place": "train.py:9"},
            "ended before its first step: KeyError: 'labels'",
        ),
        (
            *(NoStepFacts("exit code 1", 1, 0, unhooked=UnhookedFacts(42, ".")), "exit", "before_first_step"),
            *({"pid": 42}, "ended without a recorded step: no rank reported; pid 42 was"),
        ),
        (
            *(PortFacts(29500, 0, "EADDRINUSE", 9, "anna", "python train.py"), "failure", "port 29500", TAKEN),
            "port 29500 is taken by python train.py (pid 9, user anna)",
        ),
        (PortFacts(0, -1, "E"), "failure", "port 0", {**dict.fromkeys(TAKEN), "port": 0}, "a port is taken"),
        (JobFailedFacts(2, "exit code 1"), "failure", "job 2", {"job": 2}, "job 2 failed: exit code 1"),
        (
            *(ConcurrentJobFacts(2, 1, 0, ["train.py"]), "note", "beside 2", {"command": ["train.py"]}),
            "job 2 runs at the same time as job 1",
        ),
        (
            *(LeftoverFacts([ASLEEP], {7: 2**30}), "note", "leftover", {"pids": [7], "gpu_bytes": {7: 2**30}}),
            "1 process of the run could not be ended",
        ),
        (
            *(HANG, "note", "on-hang", {"action": "kill", "stacks": "/run/s.txt"}),
            "ending the run (--exit-timeout 60): 1 of 4 ranks finished, and ranks 2 and 3 were still running 1 m 00 s",
        ),
        (
            *(UnprovenHangFacts("--on-hang kill", "the host is cut off", VERDICT), "note", "on-hang-proof"),
            *({"missing": "the host is cut off"}, "--on-hang kill waits for proof: the host is cut off"),
        ),
    ],
)  # fmt: skip
def test_a_finding_of_the_hub_is_the_alert_that_it_has_always_been(facts, kind, rule, evidence, title):
    known = next(one for one in KINDS.values() if one.facts is type(facts))
    finding = Finding(known.name, facts, key=rule.removeprefix(known.rule).strip())
    (alert,) = FindingAlerts(AlertStore()).put(10.0, [finding])
    assert (alert.kind, alert.evidence["rule"]) == (kind, rule)
    assert alert.evidence.items() >= evidence.items()
    assert alert.title.startswith(title)
    assert not alert.ranks


def test_a_holder_that_cannot_be_inspected_the_default_port_and_leftovers_with_what_they_hold_in_words():
    alerts = FindingAlerts(AlertStore())
    found = [Finding("port_taken", PortFacts(port, 0, "EADDRINUSE"), key=str(port)) for port in (1, 2, 1)]
    assert [alert.id for alert in alerts.put(10.0, found)] == [1, 2], "one alert per port"
    said = kinds.words_of(Finding("port_taken", PortFacts(29500, -1, "EADDRINUSE", 0, "anna", "")))
    assert said.title == "port 29500 is taken by a process of user anna whose details need root (ss -ltnp)"
    assert said.text.startswith("The launcher could not listen there: EADDRINUSE. 29500 is the launchers' default")
    assert not said.remedy.endswith("kill 0.")
    said = kinds.words_of(Finding("leftover_processes", LeftoverFacts([ASLEEP], {7: 2**30})))
    assert "pid 7 (python) is in uninterruptible sleep in nfs_wait: it ends when the kernel returns" in said.title
    assert "They hold 1.00 GiB of GPU memory." in said.text


HOOKED = "so without ftmon's import hook;"


@pytest.mark.parametrize(
    ("ranks", "more", "title", "text"),
    [
        (
            *(2, {}, f"ended without a recorded step: {REPORTED}"),
            f"I{REPORTED[1:]} (exit code 1). The script may have ended before its first step. Steps of other processes "
            "that a rank started are not recorded. Ranks that are killed lose up to a tenth of a second of steps.",
        ),
        (
            *(1, {"error": "E: e", "error_rank": 2}, "ended before its first step: E: e"),
            "Its ranks reported, and none finished an optimizer step (exit code 1). rank 2: E: e",
        ),
        (
            *(0, {"error": "E: e", "error_place": "train.py:9"}, "ended before its first step: E: e"),
            "No rank reported; none finished an optimizer step (exit code 1). its output: E: e, raised at train.py:9",
        ),
        *(
            (
                *(0, {"last_line": "no data", "last_line_rank": rank, "last_lines": ["start", "no data"]}),
                f"ended without a recorded step: no rank reported; the last line that {who} wrote: no data",
                "No rank reported (exit code 1). ftmon saw no DeepSpeed engine and no PyTorch optimizer in it.",
            )
            for rank, who in ((None, "it"), (3, "rank 3"))
        ),
        *(
            (
                *(0, {"unhooked": UnhookedFacts(42, path)}),
                f"ended without a recorded step: no rank reported; pid 42 was started {cause}",
                f"No rank reported: pid 42 was started {cause} (exit code 1). The hook is a folder on PYTHONPATH, "
                "which the command has replaced; the process and what it starts are not recorded.",
            )
            for path, cause in (
                (".", f"with PYTHONPATH=., {HOOKED} use PYTHONPATH=.:$PYTHONPATH"),
                (None, f"without PYTHONPATH, {HOOKED} leave PYTHONPATH as it is"),
            )
        ),
    ],
)
def test_a_run_without_a_step_is_described_by_what_is_known(ranks, more, title, text):
    words = kinds.words_of(Finding("no_step", NoStepFacts("exit code 1", 1, ranks, **more)))
    remedy = "The last lines of its output may show the cause." if "last_lines" in more else ""
    assert words[:3] == (title, text, remedy)
    if ranks and "error" not in more:
        done = kinds.words_of(Finding("no_step", NoStepFacts("exit code 0", 0, ranks, **more)))
        assert done.remedy.startswith("A script without an optimizer has no steps: 'ftmon memory RUN' shows")
