"""The record of every kind of finding is complete: words, words for its evidence, resolution, way back."""

import re
import sys
import typing
from collections.abc import Iterator
from types import ModuleType, UnionType
from typing import Any

import limits_table
import msgspec
import pytest
from ftmon.protocol.analysis import kinds
from ftmon.protocol.analysis.deaths.detector import Ended, LastLog, ScriptFailure
from ftmon.protocol.analysis.findings.alerts import AlertStore
from ftmon.protocol.analysis.findings.finding import Condition, Finding, Kind, Resolution, Shown, added, resolved
from ftmon.protocol.analysis.health.monitor import LossFacts, RecordingFacts
from ftmon.protocol.analysis.kinds import KINDS, FindingAlerts
from ftmon.protocol.analysis.stalls.collectives import RankView
from ftmon.protocol.analysis.stalls.hang_detector import HangFacts
from ftmon.protocol.analysis.stalls.judge import OtherRanks, Verdict
from ftmon.protocol.messages.memory import OomReport
from ftmon.protocol.messages.telemetry import DeviceSample
from messages import EXAMPLES

VERDICT = Verdict(
    "unreachable", (0,), (), False, 10.0, views={0: RankView(0, 12, "backward", 10.0, 8.0)}, facts=OtherRanks((1,))
)
PLAIN = re.findall(
    r"\w+",
    """
    action allocated_bytes allocations at bus capacity_bytes code collective command count device error exit_code
    failures first_loss frames frees_bytes full_at_step full_in_s free_bytes function growth_bytes host improvement
    job last_collective last_lines launcher limit_reached limits_bytes loss loss_scale meaning memory_before message
    missing moved_to name never_fell new_errors number option path peak_bytes persistent_workers pid pids port
    precision process_state processes reason recent_kills report reserved_bytes resident_bytes sender signal
    since_step snapshot stack stacks stacks_by step step_ms steps target traceback usual_bytes user value verdict
    wakes_in_s workers workers_needed
    """,
)
"""Keys whose words are the key's own."""


def example(kind: Any) -> Any:
    """Give a value of a type, with every field of a struct set."""
    special = {HangFacts: HangFacts(5.0, VERDICT, {}, ""), Verdict: VERDICT}
    if kind in special:
        return special[kind]
    if kind is OomReport:
        return next(message for message in EXAMPLES if isinstance(message, OomReport))
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return example(inner[0])
    if origin is typing.Literal:
        return inner[0]
    if origin in (UnionType, typing.Union):
        return example(inner[0])
    if origin in (list, tuple):
        return origin([example(inner[0])] if inner else [])
    if origin is dict:
        return {example(inner[0]): example(inner[1])}
    if kind is Any:
        return ()
    if issubclass(kind, msgspec.Struct):
        return kind(**{name: example(hint) for name, hint in typing.get_type_hints(kind, include_extras=True).items()})
    return {int: 3, float: 0.5, str: "at", bool: True}[kind]


def findings() -> Iterator[Finding]:
    for kind in KINDS.values():
        for facts in kind.facts if isinstance(kind.facts, tuple) else (kind.facts,):
            key = "unreachable" if kind.name == "hang" else ""
            made = example(facts)
            if kind.name == "leak":
                made = msgspec.structs.replace(made, cause=None)
            yield Finding(kind.name, made, ranks=(1,), rank=1, phase="optimizer", key=key, step=3)


ALL = [pytest.param(finding, id=finding.kind) for finding in findings()]


def keys_of(evidence: dict[str, Any], by: str = "") -> Iterator[str]:
    for key, value in evidence.items():
        if not by:
            yield key
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict):
                yield from keys_of(one, kinds.shown(key).by or ("keys" if kinds.shown(key).unit else ""))


@pytest.mark.parametrize("finding", ALL)
def test_it_has_words_for_all_of_it_and_its_alert_leads_back_to_it_after_a_restart(finding):
    words = kinds.words_of(finding)
    assert words.title
    assert "\n" not in words.title
    evidence = kinds.evidence_of(finding)
    assert msgspec.json.decode(msgspec.json.encode(evidence)) is not None
    kind = KINDS[finding.kind]
    texts = [kinds.resolution_of(msgspec.structs.replace(finding, facts=Resolution(why, 7))) for why in kind.resolved]
    assert all(text.endswith(".") and "{" not in text for text in texts or [kinds.resolution_of(finding)])
    missing = {key for key in keys_of(evidence) if key not in kinds._SHOWN and key not in PLAIN}
    assert not missing, f"give these words and a unit in the kind's ``shown``: {sorted(missing)}"
    (alert,) = FindingAlerts(AlertStore()).put(10.0, [finding])
    later = FindingAlerts(store := AlertStore())
    store.restore(alert)
    restored = later.restore(alert)
    if alert.kind == "health":
        assert restored is None, "its detector finds it again"
        assert alert.evidence["finding"] == finding.kind
        return
    assert (restored.condition, restored.state) == (finding.condition, "raised")
    assert (restored.facts is not None) == (KINDS[finding.kind].restore is not None)
    (again,) = later.put(11.0, [added(restored.condition, LastLog(["last"]))])
    assert (again.id, again.evidence) == (alert.id, {**alert.evidence, "log": ["last"]})


def test_kinds_cannot_contradict_each_other_and_the_document_s_table_of_thresholds_is_theirs():
    known = KINDS["leak"]
    with pytest.raises(ValueError, match="exists"):
        kinds.register(known)
    other = Kind("another", known.facts, known.words, shown={"place": Shown("somewhere")})
    with pytest.raises(ValueError, match="'place' is shown as"):
        kinds.register(other)
    assert "another" not in KINDS
    text = limits_table.DOCUMENT.read_text()
    assert text == limits_table.rewritten(text), "run: python tests/support/limits_table.py"


def test_the_detector_of_the_document_raises_and_resolves_its_alert(monkeypatch, make_sim):
    (code,) = re.findall(r"```python\n(.*?)```", limits_table.DOCUMENT.read_text(), re.S)
    assert code.count("\n") <= 50
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, "documented", module)
    exec(compile(code, "docs/detectors.md", "exec"), vars(module))
    monkeypatch.setattr(kinds, "DETECTORS", [*kinds.DETECTORS, module.HostMemory])
    # What the test registers is forgotten after it.
    monkeypatch.setattr(kinds, "KINDS", dict(KINDS))
    monkeypatch.setattr(kinds, "_SHOWN", dict(kinds._SHOWN))
    kinds.register(*module.HostMemory.kinds)
    sim = make_sim(1)
    sim.feed(DeviceSample("n", "host", 0, "n", sim.now, 98 * 2**30, 100 * 2**30))
    (alert,) = sim.alerts("health")
    assert alert.title == "the memory of n is nearly full: 98.00 GiB of 100.00 GiB"
    assert alert.text == "The kernel ends a process if none is left. Use fewer dataloader workers, or offload less."
    sim.feed(DeviceSample("n", "host", 0, "n", sim.now, 50 * 2**30, 100 * 2**30))
    (alert,) = sim.alerts("health")
    assert alert.text.endswith("It has room again.")
    assert kinds.shown("of_bytes") == Shown("of", "bytes")


def test_what_is_added_goes_by_its_name_not_by_the_words_that_are_there():
    condition = Condition("failure", 1, "data")
    error = "RuntimeError: a worker failed. It ended: exit code 1."
    alerts = FindingAlerts(AlertStore())
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
    remedy = "Free space on that disk; recording resumes by itself."
    assert kinds.evidence_of(full) == {"remedy": remedy, "error": "No space left on device", "recorded": 7}
    assert kinds.resolution_of(resolved(full.condition, Resolution("resumed"))) == "Recording again."
