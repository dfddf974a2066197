"""Reading snapshot files: old formats, and everything that is to be refused in one line."""

import contextlib
import gzip
import os
import pickle
import resource
import tracemalloc
from typing import Any

import pytest
from caching_allocator import MIB, CachingAllocator
from ftmon.protocol.analysis.allocator.snapshot_layout import fragmentation, layout_at
from ftmon.protocol.analysis.allocator.snapshot_replay import Replay
from ftmon.protocol.analysis.allocator.snapshot_views import live_stacks
from ftmon.protocol.host.machine import available_memory
from ftmon.protocol.snapshot.columns import SnapshotError
from ftmon.protocol.snapshot.reader import check_cost, estimate, granted_memory, open_snapshot, read_pickle
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_files import DATA, ELEMENTS, bomb, compact, read_snapshot, refusal


@pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
def test_a_packed_file_of_small_objects_is_refused_before_they_are_made(tmp_path, element):
    path = bomb(tmp_path, element)
    assert path.stat().st_size < 2**20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError, match="refused: it asks for far more memory than its size justifies"):
        read_pickle(path, most_bytes=2**32, most_memory=2**30)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_what_is_granted_is_bounded_by_the_host(tmp_path, monkeypatch):
    for name in ("oom_backward", "step_zero3"):  # real ones are far below the bound
        real = DATA / f"{name}.pickle.gz"
        check_cost(real, most_memory=real.stat().st_size * 200)
    path = tmp_path / "large.pickle"
    with path.open("wb") as file:
        file.truncate(2**36)
    assert available_memory() > 0
    monkeypatch.setattr("ftmon.protocol.snapshot.reader.available_memory", lambda: 2**20)
    assert granted_memory(path) == 2**19


OBJECTS = {
    "float": b"G\x3f\xf0\x00\x00\x00\x00\x00\x01", "text float": b"F1\n", "int": b"M\xe8\x03",
    "long": b"\x8a\x09" + b"\x7f" * 9, "text int": b"I300\n", "string": b"\x8c\x02ab",
    "string in the memo": b"\x8c\x02ab\x94", "wide string": b"\x8c\x14" + b"a" * 16 + "\U0001f600".encode(),
    "bytes": b"C\x02ab", "dictionary of one": b"}K\x01Ns", "dictionary from a mark": b"(K\x01Nd",
    "dictionary of six": b"}(" + b"".join(b"K%cN" % key for key in range(6)) + b"u",
    "dictionary of 200": b"}(" + b"".join(b"K%cN" % key for key in range(200)) + b"u", "list of one": b"]Na",
    "list from a mark": b"(Nl", "list of ten": b"](" + b"N" * 10 + b"e", "tuple from a mark": b"(Nt",
    "tuple of three": b"NNN\x87", "set": b"\x8f(" + b"".join(b"K%c" % key for key in range(5)) + b"\x90",
    "frozen set": b"(K\x01\x91", "reference": b"h\x00", **ELEMENTS,
}  # fmt: skip


def taken(data: bytes) -> int:
    """Return the bytes that unpickling takes at its highest."""
    tracemalloc.start()
    try:
        kept = pickle.loads(data)
        del kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("element", OBJECTS.values(), ids=OBJECTS)
def test_no_object_takes_more_than_its_opcodes_are_counted_for(element):
    data = b"\x80\x04]\x94" + b"(" + element * 5000 + (b"t" * 5000 if element == b"(" else b"") + b"e."
    assert taken(data) < estimate(data) + 100_000


def plain() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    keys = st.integers() | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner) | st.tuples(inner, inner))


@given(plain(), st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_take_less_than_is_counted_in_every_protocol(value, protocol):
    data = pickle.dumps([value] * 3, protocol)
    assert taken(data) < estimate(data) + 100_000


def small() -> dict[str, Any]:
    allocator = CachingAllocator()
    allocator.alloc(3 * MIB, frames=[{"name": "f", "filename": "train.py", "line": 3}])
    return allocator.snapshot()


@pytest.mark.parametrize("protocol", range(6))
def test_any_pickle_protocol_is_read_packed_or_not(tmp_path, protocol):
    data = pickle.dumps(small(), protocol)
    for name, content in (("plain", data), ("packed", gzip.compress(data))):
        (tmp_path / name).write_bytes(content)
        assert Replay(read_snapshot(tmp_path / name), 0).allocated[-1] == 20 * MIB - 17 * MIB


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"cbuiltins\neval\n.", "would run code"),
        (pickle.dumps(pytest.approx), "would run code"),
        (b"Pthing\n.", "would run code"),
        (b"(ios\nsystem\n.", "would run code"),
        (pickle.dumps(small())[:-99], "cut short"),
        (gzip.compress(pickle.dumps(small()))[:-99], "cut short"),
        (b"hello, this is no pickle at all", "not a memory snapshot"),
        (b"PK\x03\x04rest", "zip file"),
        (b"\x1f\x8b\x08\x00" + b"garbage" * 20, "gzip data is damaged"),
        (pickle.dumps([1, 2, 3]), "not a memory snapshot"),
        (pickle.dumps({"model": {}}), "without 'segments'"),
        (pickle.dumps({"segments": [{"total_size": "many"}]}), "not a memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": 1 << 80}]]}), "not a memory"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "size": -5}]]}), "not a memory"),
        (pickle.dumps({"segments": [], "device_traces": [[{"action": "alloc", "frames": [7]}]]}), "not a memory"),
        (pickle.dumps({"segments": [], "device_traces": {"a": 1}}), "not a memory snapshot"),
        (pickle.dumps({"segments": [{"device": True, "total_size": True, "blocks": []}]}), "not a memory snapshot"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_words(tmp_path, content, words):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert words in refusal(path)


def test_a_directory_a_missing_or_empty_file_a_pipe_and_one_that_expands_too_far_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    assert "empty" in refusal(tmp_path / "file", open_snapshot)
    assert "a directory" in refusal(tmp_path, open_snapshot)
    assert "no such file" in refusal(tmp_path / "nowhere", open_snapshot)
    assert "not a regular file" in refusal(tmp_path / "pipe", open_snapshot)
    path = tmp_path / "zeros.pickle.gz"
    part = gzip.compress(bytes(2**24))
    path.write_bytes(gzip.compress(b"\x80\x04\x8e" + (2**32).to_bytes(8, "little")) + part * 256)
    with pytest.raises(SnapshotError, match="refused: it unpacks to more than"):
        read_pickle(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_without_permission_is_refused_in_words(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps(small()))
    path.chmod(0)
    assert "no permission" in refusal(path, open_snapshot)


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_a_damaged_snapshot_is_read_or_refused_but_never_anything_else(tmp_path_factory, data):
    content = bytearray(pickle.dumps(small(), data.draw(st.integers(0, 5))))
    # No opcode that asks for memory by a number: those are for the child process alone.
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.sampled_from(b"\x00.(0t}]NK\x85\x94seuh"))
    path = tmp_path_factory.getbasetemp() / "fuzzed"
    path.write_bytes(content)
    with contextlib.suppress(SnapshotError):
        Replay(compact(read_pickle(path), "fuzzed"), 0)


KEYS = (
    "segments", "device_traces", "blocks", "frames", "address", "addr", "total_size", "size", "requested_size", "state",
    "action", "stream", "device", "time_us", "user_metadata", "external_annotations", "stage", "name", "filename",
    "line", "history", "segment_pool_id", "allocator_settings",
    "roundup_power2_divisions", "max_split_size", "is_expandable",
)  # fmt: skip
WORDS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_map", "segment_unmap", "segment_free",
         "oom", "active_allocated", "active_pending_free", "inactive", "START", "END", "small")  # fmt: skip
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.integers(0, 2**40), st.sampled_from(WORDS), st.floats()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=25,
)


@given(PLAIN, st.lists(st.dictionaries(st.sampled_from(KEYS), PLAIN, max_size=8), max_size=6))
@settings(deadline=None, max_examples=60)
def test_any_plain_data_is_read_or_refused_and_what_is_read_is_consistent(segments, entries):
    with contextlib.suppress(SnapshotError):
        read = compact({"segments": segments, "device_traces": [entries]}, "made")
        for device in read.devices():
            replay = Replay(read, device)
            for index in range(-1, replay.entries):
                live = live_stacks(replay, index)
                assert sum(tally.bytes for tally in live.values()) == replay.at(replay.allocated, index)
                fragmentation(layout_at(replay, index))


def test_what_older_versions_lack_is_no_error_and_their_history_has_request_and_stack():
    snapshot = small()
    for entry in snapshot["device_traces"][0]:
        del entry["time_us"], entry["frames"]
    for segment in snapshot["segments"]:
        del segment["segment_pool_id"], segment["is_expandable"], segment["frames"]
        for block in segment["blocks"]:
            del block["frames"], block["address"]
    replay = Replay(compact(snapshot, "old"), 0)
    assert replay.allocated[-1] == 3 * MIB
    assert compact(snapshot["segments"], "a list").devices() == [0]
    snapshot = small()
    for block in snapshot["segments"][0]["blocks"]:
        frames, asked = block.pop("frames"), block.pop("requested_size")
        if asked:
            block["history"] = [{"real_size": asked - 100, "frames": frames}]
    read = compact({"segments": snapshot["segments"]}, "old")
    replay = Replay(read, 0)
    assert replay.requested[-1] == 3 * MIB - 100
    assert read.frames[0].filename == "train.py"


def test_several_devices_have_a_replay_each_and_names_cannot_write_to_the_terminal():
    one, other = CachingAllocator(device=0), CachingAllocator(device=2)
    one.alloc(MIB)
    other.alloc(7 * MIB)
    first, second = one.snapshot(), other.snapshot()
    traces = [first["device_traces"][0], [], second["device_traces"][2]]
    read = compact({"segments": first["segments"] + second["segments"], "device_traces": traces}, "both")
    assert read.devices() == [0, 2]
    assert [Replay(read, device).allocated[-1] for device in (0, 2)] == [MIB, 7 * MIB]
    allocator = CachingAllocator()
    allocator.alloc(512, frames=[{"name": "\x1b]0;title\x07f\ud800", "filename": "a\nb.py", "line": 1}])
    frame = compact(allocator.snapshot(), "made").frames[0]
    assert frame.name.isprintable()
    assert frame.filename.isprintable()
    frame.name.encode()


def test_a_failed_allocation_may_be_larger_than_any_memory_and_no_other_entry():
    made = CachingAllocator()
    made.alloc(512)
    raw = made.snapshot()
    entry = dict(raw["device_traces"][0][-1])
    raw["device_traces"][0].append({**entry, "action": "oom", "size": 2**62, "device_free": 7, "frames": []})
    trace = compact(raw, "made").trace(0)
    assert (memoryview(trace.sizes).cast("q")[-1], trace.device_free) == (2**62, {len(trace) - 1: 7})
    raw["device_traces"][0][-1]["action"] = "alloc"
    with pytest.raises(SnapshotError, match="an invalid size"):
        compact(raw, "made")
