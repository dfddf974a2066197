"""A trace has each phase on a track of its own, where slices follow each other, flows between ranks, exact counters."""

import sqlite3
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.reader import Reader
from ftmon.tui.cli.main import main
from msgspec.structs import replace
from streams import Stream, write

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4


class Parsed:
    """A trace parsed back: slices and counters by process and track, in the order of time."""

    def __init__(self, path: Path) -> None:
        trace = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2").Trace()
        trace.ParseFromString(path.read_bytes())
        self.tracks: dict[int, Any] = {}
        self.slices: dict[tuple[str, str], list[tuple[int, int, str]]] = defaultdict(list)
        self.counters: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self.instants: list[tuple[tuple[str, str], int, str, dict[str, str]]] = []
        self.flows: dict[int, list[tuple[tuple[str, str], int]]] = defaultdict(list)
        self.arguments: dict[tuple[tuple[str, str], int], dict[str, int]] = {}
        names: dict[int, str] = {}
        annotations: dict[int, str] = {}
        assert trace.packet[0].sequence_flags & 1, "the first packet clears the sequence's state"
        for packet in trace.packet:  # interned names and tracks come before their first use
            assert packet.trusted_packet_sequence_id == 1
            if packet.HasField("track_descriptor"):
                self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if packet.HasField("clock_snapshot"):
                self.clocks = {clock.clock_id: clock for clock in packet.clock_snapshot.clocks}
            names |= {one.iid: one.name for one in packet.interned_data.event_names}
            annotations |= {one.iid: one.name for one in packet.interned_data.debug_annotation_names}
        events = [packet for packet in trace.packet if packet.HasField("track_event")]
        open_slices: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        for packet in sorted(events, key=self.time_of):  # stable, as trace_processor's
            event, at = packet.track_event, self.time_of(packet)
            key = self.place(event.track_uuid)
            if event.type == _BEGIN:
                open_slices[key].append((at, event.name or names[event.name_iid]))
                for flow in event.flow_ids:
                    self.flows[flow].append((key, at))
                more = {annotations[one.name_iid]: one.uint_value for one in event.debug_annotations}
                self.arguments[key, at] = more
                assert len(open_slices[key]) == 1, f"{key}: a slice begins within another"
            elif event.type == _END:
                begun, name = open_slices[key].pop()
                self.slices[key].append((begun, at - begun, name))
            elif event.type == _COUNTER:
                self.counters[key].append((at, event.counter_value))
            else:
                more = {one.name: one.string_value for one in event.debug_annotations}
                self.instants.append((key, at, event.name, more))
        assert not any(open_slices.values())

    def time_of(self, packet: Any) -> int:
        assert self.clocks[6].timestamp == self.clocks[1].timestamp, "the time of day"
        return packet.timestamp

    def place(self, uuid: int) -> tuple[str, str]:
        track = self.tracks[uuid]
        return (self.tracks[track.parent_uuid].process.process_name if track.parent_uuid else "", track.name)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record two ranks: rank 0 alone has collectives in step 7, rank 1 is late in step 5, step 60 was taken twice."""
    frames = list(Stream(ranks=2, steps=60, spike_every=40).frames())
    for place, frame in enumerate(frames):
        step = frame.message
        if isinstance(step, Step) and (step.rank, step.step) == (0, 7):
            alone = [replace(one, collectives=3 * (one.name == "forward"), collective_us=0) for one in step.phases]
            frames[place] = replace(frame, message=replace(step, phases=alone))
        if isinstance(step, Step) and (step.rank, step.step) == (1, 5):
            late = [replace(phase, device_us=phase.host_us * 3) for phase in step.phases]
            frames[place] = replace(frame, message=replace(step, phases=late, device_us=None))
    t, seq = frames[-1].t, frames[-1].seq
    raised = Alert(70, "hang", "error", t, "the ranks wait")
    frames += [Frame(seq + 1, t, raised), Frame(seq + 2, t, replace(raised, resolved=t))]
    again = [frame.message for frame in frames if isinstance(frame.message, Step) and frame.message.step == 60]
    frames += [Frame(seq + 3 + step.rank, t + 9, replace(step, started=step.started + 9)) for step in again]
    return write(tmp_path_factory.mktemp("recorded") / "r.sqlite", frames)


@pytest.fixture(scope="module")
def parsed(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Parsed:
    pytest.importorskip("perfetto")
    out = tmp_path_factory.mktemp("exported") / "run.pftrace"
    assert main(["export", str(path), "perfetto", "-o", str(out)]) == 0
    return Parsed(out)


def steps_of(path: Path, rank: int) -> list[Step]:
    with Reader(path) as reader:
        messages = [frame.message for frame in reader.frames(limit=10_000)]
    return [message for message in messages if isinstance(message, Step) and message.rank == rank]


def test_each_phase_has_a_track_on_the_host_and_one_on_the_device(path, parsed):
    phases = ("data", "forward", "backward", "optimizer")
    tracks = {f"{phase} on the {place}" for phase in phases for place in ("host", "device")} | {"steps"}
    assert set(parsed.slices) == {(f"rank {rank}", track) for rank in range(2) for track in tracks}
    steps = steps_of(path, 0)
    for phase in phases:
        host = parsed.slices["rank 0", f"{phase} on the host"]
        wanted = [(step.started, step.phase(phase)) for step in steps]
        assert [spent for _, spent, _ in host] == [record.host_us * 1000 for _, record in wanted]
        assert {name for *_, name in host} == {phase}
        for (begun, *_), (started, record) in zip(host, wanted, strict=True):
            assert begun / 1e9 == pytest.approx(started + record.start_us / 1e6, abs=2e-6)
    assert [name for *_, name in parsed.slices["rank 0", "steps"]] == [f"step {step.step}" for step in steps]


def test_phases_of_a_device_run_one_after_the_other_and_an_alert_is_one_instant_of_its_rank(path, parsed):
    for rank in range(2):
        tracks = [key for key in parsed.slices if key[0] == f"rank {rank}" and key[1].endswith("on the device")]
        slices = sorted(one for key in tracks for one in parsed.slices[key])
        assert all(first[0] + first[1] <= second[0] for first, second in pairwise(slices))
        measured = [phase.device_us for step in steps_of(path, rank) for phase in step.phases]
        assert [spent for _, spent, _ in slices] == [spent * 1000 for spent in measured]
    (spike, whole) = parsed.instants
    assert (spike[0], spike[3]["step"], spike[3]["kind"]) == (("rank 1", "alerts"), "40", "spike")
    assert (whole[0], whole[2], whole[3]["severity"]) == (("", "alerts"), "the ranks wait", "error")


def test_a_flow_joins_the_collectives_of_a_phase_of_all_ranks(path, parsed):
    wanted: dict[tuple[int, float, str], list[tuple[int, int]]] = defaultdict(list)
    again = max(step.started for step in steps_of(path, 0)) - 4
    for rank in range(2):
        for step in steps_of(path, rank):
            for phase in step.phases:
                if phase.collectives:
                    wanted[step.step, step.started > again, phase.name].append((phase.collectives, phase.collective_us))
    found = []
    for joined in parsed.flows.values():
        ranks = [process for (process, _), _ in joined]
        assert len({*ranks}) == len(ranks)
        assert len({track for (_, track), _ in joined}) == 1
        calls = [parsed.arguments[one] for one in sorted(joined)]
        found.append([(one["collectives"], one["collective_us"]) for one in calls])
    assert sorted(found) == sorted(wanted.values())
    assert sum(len(one) == 2 for one in found) == 2 * 61 - 2, "backward and optimizer, but for step 7"
    assert [one for one in found if len(one) == 1 and one[0][0] == 3] == [[(3, 0)]]


def test_counters_are_those_of_the_steps(path, parsed):
    for rank in range(2):
        steps = steps_of(path, rank)
        peaks = [value for _, value in parsed.counters[f"rank {rank}", "allocated peak"]]
        assert peaks == [max(phase.allocated.peak for phase in step.phases) for step in steps]
        rates = [value for _, value in parsed.counters[f"rank {rank}", "tokens/s"]]
        assert rates == [round(step.tokens / step.training_us * 1e6) for step in steps]
        reserved = [value for _, value in parsed.counters[f"rank {rank}", "reserved peak"]]
        assert reserved == [max(phase.reserved.peak for phase in steps[0].phases)], "only where it changes"
    units = {track.name: track.counter.unit for track in parsed.tracks.values() if track.HasField("counter")}
    assert units == {"allocated peak": 3, "reserved peak": 3, "tokens/s": 0}


def test_ranks_on_the_cpu_have_the_resident_set_and_no_device(tmp_path):
    pytest.importorskip("perfetto")
    path, out = tmp_path / "r.sqlite", tmp_path / "run.pftrace"
    write(path, Stream(ranks=1, steps=3, cuda=False).frames())
    assert main(["export", str(path), "perfetto", "-o", str(out)]) == 0
    parsed = Parsed(out)
    peaks = [max(phase.resident.peak for phase in step.phases) for step in steps_of(path, 0)]
    assert [value for _, value in parsed.counters["rank 0", "resident peak"]] == peaks
    assert [track for _, track in parsed.slices if "device" in track] == []


def test_figures_beyond_the_format_are_left_out(tmp_path, path):
    pytest.importorskip("perfetto")
    damaged, out = tmp_path / "damaged.sqlite", tmp_path / "run.pftrace"
    damaged.write_bytes(path.read_bytes())
    connection = sqlite3.connect(damaged, isolation_level=None)
    for change in (
        f"rank = {1 << 40}",
        f"rank = 9, tokens = {1 << 62}, host_us = 1",
        "rank = 9, started = started - 10000",
        f"rank = 9, host_us = {1 << 62}",
        "rank = 9, started = 1e300",
    ):
        number = connection.execute("SELECT max(seq) FROM steps WHERE rank = 0").fetchone()[0]
        connection.execute(f"UPDATE steps SET {change} WHERE seq = {number}")
    connection.close()
    assert main(["export", str(damaged), "perfetto", "-o", str(out)]) == 0
    early, late = Parsed(out).slices["rank 9", "steps"]
    assert late[0] - early[0] == pytest.approx(10_000e9, rel=0.01), "a clock of another host may be hours behind"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "perfetto needs the package perfetto; run: pip install 'ftmon[perfetto]'"),
        (["--series", "steps"], "--series: perfetto has none; remove the option"),
        (["--rank", "1"], "--rank, --step: perfetto has all ranks and steps"),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(tmp_path, path, capsys, monkeypatch, words, line):
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2", None)
    assert main(["export", str(path), "perfetto", "-o", str(tmp_path / "out"), *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
