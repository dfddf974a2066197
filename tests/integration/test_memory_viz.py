"""A captured snapshot is written as PyTorch's viewer reads it, and without what a foreign pickle could run."""

import gzip
import importlib.util
import json
import pickle
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from ftmon.protocol.messages.telemetry import SnapshotTaken
from ftmon.protocol.messages.wire import Frame
from ftmon.tui.cli.main import main
from places import DATA
from streams import Stream, write

FILES = {2: "step_zero3", 4: "oom_backward", 6: "expandable_zero2"}


@pytest.fixture(scope="module")
def viewer() -> ModuleType:
    """Load PyTorch's own reader, which needs no PyTorch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("needs torch")
    spec = importlib.util.spec_from_file_location("viewer", Path(torch.origin).parent / "cuda" / "_memory_viz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Record a run whose rank 1 captured three snapshots, and one whose file is gone."""
    folder = tmp_path / "run" / "snapshots"
    folder.mkdir(parents=True)
    frames = list(Stream(ranks=2, steps=8).frames())
    t, seq = frames[-1].t, frames[-1].seq
    for step, name in FILES.items():
        (folder / f"{name}.pickle").write_bytes(gzip.decompress((DATA / f"{name}.pickle.gz").read_bytes()))
        taken = SnapshotTaken(1, step, t, f"/elsewhere/{name}.pickle", 1, "request")
        frames.append(Frame(seq + step, t, taken))
    frames.append(Frame(seq + 1, t, SnapshotTaken(1, 1, t, "/etc/passwd", 1, "request")))
    return write(tmp_path / "run" / "recording.sqlite", sorted(frames, key=lambda frame: frame.seq)).parent


def sums(snapshot: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the figures of each segment and its used blocks."""
    own = (
        "device", "address", "total_size", "allocated_size", "active_size", "stream", "segment_type",
        "is_expandable",
    )  # fmt: skip
    return [
        (
            *(segment[name] for name in own),
            [(block["address"], block["size"], block["state"]) for block in segment["blocks"]],
            [(block["requested_size"], block["frames"]) for block in segment["blocks"] if block["state"] != "inactive"],
        )
        for segment in snapshot["segments"]
    ]


def entries(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of the traces, with the keys that the viewer reads."""
    keys = ("action", "addr", "size", "stream", "time_us", "device_free", "frames")
    return [{key: entry[key] for key in keys if key in entry} for trace in snapshot["device_traces"] for entry in trace]


@pytest.mark.parametrize("step", FILES)
def test_the_file_is_the_captured_snapshot_with_every_key_that_the_page_reads(tmp_path, run, viewer, capsys, step):
    out = tmp_path / "out.pickle"
    assert main(["export", str(run), "memory_viz", "-o", str(out), "--rank", "1", "--step", str(step)]) == 0
    assert capsys.readouterr().out == f"written: {out}: rank 1, step {step}, request\n"
    written = pickle.loads(out.read_bytes())
    captured = pickle.loads((run / "snapshots" / f"{FILES[step]}.pickle").read_bytes())
    assert (sums(written), entries(written)) == (sums(captured), entries(captured))
    assert viewer.segsum(written) == viewer.segsum(captured)
    seen = viewer.trace({**written, "device_traces": [entries(written)]})
    assert seen == viewer.trace({**captured, "device_traces": [entries(captured)]})
    assert viewer.trace(written).count("\n") > 100
    spans = [(one["name"], one["stage"], one["time_us"]) for one in captured.get("external_annotations", [])]
    kept = [(one["name"], one["stage"], one["time_us"]) for one in written["external_annotations"]]
    assert sorted(kept) == sorted(spans)
    blocks = [block for segment in written["segments"] for block in segment["blocks"]]
    traced = [entry for trace in written["device_traces"] for entry in trace]
    found: dict[str, list[dict[str, Any]]] = {
        "": [written],
        "segment": written["segments"],
        "block": blocks,
        "entry": [entry for entry in traced if entry["action"] != "oom"],
        "oom": [entry for entry in traced if entry["action"] == "oom"],
        "frame": [frame for one in (*blocks, *traced) for frame in one["frames"]],
    }
    for kind, some in found.items():
        assert some or kind == "oom" or (kind, step) == ("frame", 6), "that file has no stacks"
        assert all(one.keys() == KEYS[kind] for one in some), kind


KEYS = {
    "": {"segments", "device_traces", "allocator_settings", "external_annotations"},
    "segment": {
        *("device", "address", "total_size", "allocated_size", "active_size", "requested_size", "stream"),
        *("segment_type", "segment_pool_id", "is_expandable", "frames", "blocks"),
    },
    "block": {"address", "size", "requested_size", "state", "frames"},
    "entry": {"action", "addr", "size", "stream", "time_us", "frames", "user_metadata"},
    "oom": {"action", "device_free", "size", "stream", "time_us", "frames", "user_metadata"},
    "frame": {"name", "filename", "line"},
}
"""The keys that the page reads (pytorch.org/memory_viz, MemoryViz.js); ``trace_plot`` takes any dictionary."""


@pytest.mark.parametrize("step", FILES)
def test_a_flame_graph_has_the_memory_of_the_highest_moment_by_stack(tmp_path, run, capsys, step):
    picture, stacks = tmp_path / "step.svg", tmp_path / "step.folded"
    for path in (picture, stacks):
        words = ["export", str(run), "flamegraph", "-o", str(path), "--rank", "1", "--step", str(step)]
        assert main(words) == 0
    assert f"{stacks}: rank 1, step {step}, request: " in capsys.readouterr().out
    assert main(["snapshot", str(run / "snapshots" / f"{FILES[step]}.pickle"), "--json", "--top", "100000"]) == 0
    described = json.loads(capsys.readouterr().out)
    peak = max(device["peak_allocated_bytes"] for device in described["devices"])
    lines = [line.rpartition(" ") for line in stacks.read_text().splitlines()]
    assert sum(int(size) for *_, size in lines) == peak
    largest = described["top_stacks"][0]
    assert max(int(size) for *_, size in lines) == largest["bytes"]
    depths = {len(one["frames"]) for one in described["top_stacks"] if one["bytes"] == largest["bytes"]}
    assert {text.count(";") + 1 for text, _, size in lines if int(size) == largest["bytes"]} <= {*depths, 1}
    drawn = [element for element in ElementTree.parse(picture).getroot() if element.tag.endswith("}g")]
    boxes = [{name: float(box.attrib[name]) for name in ("x", "y", "width")} for box in (group[1] for group in drawn)]
    assert (drawn[0][0].text or "").startswith(f"all: {peak / 2**30:.2f} GiB, 100.0%")
    rows: dict[float, list[dict[str, float]]] = defaultdict(list)
    for box in boxes:
        rows[box["y"]].append(box)
    for y, row in rows.items():
        row.sort(key=lambda box: box["x"])
        assert all(one["x"] + one["width"] <= other["x"] + 0.11 for one, other in pairwise(row))
        below = rows.get(y + 17)
        if below:  # each box stands on one of its callers
            for box in row:
                assert any(
                    one["x"] - 0.11 <= box["x"] and box["x"] + box["width"] <= one["x"] + one["width"] + 0.11
                    for one in below
                )
    assert "<script" not in picture.read_text()


@pytest.mark.parametrize("kind", ["memory_viz", "flamegraph"])
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "rank 0 has no memory snapshot: 'ftmon capture RUN' captures one on a GPU"),
        (["--rank", "1", "--step", "3"], "rank 1 has no memory snapshot of step 3; it has some of 1, 2, 4, 6"),
        (["--rank", "1", "--step", "1"], "snapshots/passwd: the snapshot of step 1 is gone"),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(tmp_path, run, capsys, kind, words, line):
    assert main(["export", str(run), kind, "-o", str(tmp_path / "out"), *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
