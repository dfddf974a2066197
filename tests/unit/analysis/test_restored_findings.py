"""From a finding to its alert and, for a hub that is restarted, back."""

from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.deaths.detector import Ended, ScriptFailure
from ftmon.protocol.analysis.findings.alerts import AlertStore
from ftmon.protocol.analysis.findings.finding import Condition, Finding, Resolution, added, resolved
from ftmon.protocol.analysis.health.monitor import LossFacts, RecordingFacts
from ftmon.protocol.analysis.kinds import FindingAlerts


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
