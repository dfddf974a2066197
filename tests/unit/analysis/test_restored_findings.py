"""From a finding to its alert and, for a hub that is restarted, back."""

from typing import Any

import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.deaths.facts import Ended, EndedEarly, LauncherEnded, ProcessDeath, ScriptFailure
from ftmon.protocol.analysis.finding_alerts import FindingAlerts
from ftmon.protocol.analysis.findings import Finding
from ftmon.protocol.analysis.findings.alert_store import AlertStore
from ftmon.protocol.analysis.findings.finding import Condition, Resolution, added, resolved
from ftmon.protocol.analysis.health.hub import LossFacts, RecordingFacts
from ftmon.protocol.analysis.hub_facts import MissingRanksFacts, NoStepFacts
from ftmon.protocol.analysis.oom.detector import Released, Uncaught
from ftmon.protocol.analysis.stalls.hang_detector import HangFacts, StoppedFacts, UnreachableFacts
from ftmon.protocol.analysis.stalls.rank_view import RankView
from ftmon.protocol.analysis.stalls.verdicts import CutOff, Verdict

VIEW = RankView(0, 12, "backward", 10.0, 8.0)
CUT_OFF = Verdict("unreachable", (0,), (), False, 10.0, views={0: VIEW}, facts=CutOff((1,)))


@pytest.mark.parametrize(
    ("condition", "facts"),
    [
        (Condition("failure", 1, "data"), ScriptFailure("KeyError", "", [])),
        (Condition("ended_early"), EndedEarly({1: 5, 2: 6}, 0, "closed", "", [])),
        (Condition("died", 1), ProcessDeath(101, 1, None, "", [])),
        (Condition("launcher_ended"), LauncherEnded(1, 2, [])),
        (Condition("oom_failure", 1, "data"), Uncaught("MemoryError", "")),
        (Condition("hang", key="unreachable"), HangFacts(5.0, CUT_OFF, {}, "")),
        (Condition("stopped", 1), StoppedFacts(101, False)),
        (Condition("unreachable"), UnreachableFacts("")),
        (Condition("telemetry_lost"), LossFacts(3, 1, {"rank-1-2-3": 3}, ("rank-1-2-3",))),
        (Condition("not_recording"), RecordingFacts("disk full", 7)),
        (Condition("no_step"), NoStepFacts("exit code 1", 1, 2)),
        (Condition("missing_ranks"), MissingRanksFacts([1], 2, "0.0.0.0:7420")),
    ],
)
def test_an_alert_of_the_recording_is_the_same_matter_again_and_goes_on_under_its_id(condition: Condition, facts: Any):
    finding = Finding(condition.kind, facts, ranks=(1,), rank=condition.rank, phase=condition.phase, key=condition.key)
    (alert,) = FindingAlerts(AlertStore()).put(10.0, [finding])
    store = AlertStore()
    store.restore(alert)
    later = FindingAlerts(store)
    restored = later.restore(alert)
    assert restored is not None
    assert (restored.condition, restored.state) == (condition, "raised")
    (again,) = later.put(11.0, [added(restored.condition, Released())])
    assert (again.id, again.evidence) == (alert.id, {**alert.evidence, "held": False})


def test_what_is_added_goes_by_its_name_not_by_the_words_that_are_there():
    condition = Condition("failure", 1, "data")
    error = "RuntimeError: a worker failed. It ended: exit code 1."
    store = AlertStore()
    alerts = FindingAlerts(store)
    raised = Finding("failure", ScriptFailure(error, "", []), ranks=(1,), rank=1, phase="data")
    (alert,) = alerts.put(10.0, [raised])
    (said,) = alerts.put(11.0, [added(condition, Ended(1, None))])
    assert said.text == f"{alert.text} It ended: exit code 1."
    assert alerts.put(12.0, [added(condition, Ended(1, None))]) == []
    (corrected,) = alerts.put(13.0, [added(condition, Ended(3, None))])
    assert corrected.text == f"{alert.text} It ended: exit code 3."
    again = AlertStore()
    again.restore(corrected)
    assert FindingAlerts(again).put(14.0, [added(condition, Ended(3, None))]) == []


def test_the_monitors_own_troubles_in_words():
    lost = Finding("telemetry_lost", LossFacts(12, 2, {}, ("rank-1-4711-99", "agent")))
    assert kinds.words_of(lost).title == "12 messages of telemetry lost, 2 just now from agent, rank 1"
    one = Finding("telemetry_lost", LossFacts(1, 1, {}, ("agent",)))
    assert kinds.words_of(one).title == "1 message of telemetry lost, 1 just now from agent"
    assert kinds.resolution_of(resolved(lost.condition, Resolution("calm"))) == "None lost since."
    full = Finding("not_recording", RecordingFacts("No space left on device", 7))
    assert kinds.words_of(full).title == "not recording: No space left on device"
    assert kinds.evidence_of(full) == {"error": "No space left on device", "recorded": 7}
    assert kinds.resolution_of(resolved(full.condition, Resolution("resumed"))) == "Recording again."
