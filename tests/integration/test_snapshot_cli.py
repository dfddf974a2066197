"""``ftmon snapshot`` and ``ftmon oom`` of snapshot files: what they print, and how they refuse."""

import json
import pickle
from pathlib import Path

from caching_allocator import MIB, CachingAllocator
from ftmon.tui.cli.main import main
from snapshot_files import DATA

OOM, STEP = str(DATA / "oom_backward.pickle.gz"), str(DATA / "step_zero3.pickle.gz")


def test_json_has_every_field_that_scripts_may_count_on_and_of_two_files_the_difference(capsys):
    assert main(["snapshot", OOM, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    device = "device allocated_bytes active_bytes requested_bytes reserved_bytes segments blocks free_bytes peak_index"
    device += " largest_free_block_bytes trace_entries peak_allocated_bytes"
    oom = (
        "device requested_bytes device_free_bytes allocated_bytes reserved_bytes largest_free_block_bytes verdict stack"
    )
    assert set(device.split()) <= told["devices"][0].keys()
    assert set(oom.split()) <= told["oom"].keys()
    assert {"bytes", "count", "frames"} <= told["top_stacks"][0].keys()
    assert sum(stack["bytes"] for stack in told["top_stacks"]) <= told["devices"][0]["peak_allocated_bytes"]
    assert told["devices"][0]["allocated_bytes"] == 19630109184
    assert told["oom"]["device_free_bytes"] == 128973930496
    assert main(["snapshot", STEP, OOM, "--json", "--top", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["file"], told["difference"]["before"], len(told["top_stacks"])) == (OOM, STEP, 3)
    assert told["difference"]["devices"][0]["allocated_bytes"] == 19630109184 - 8491010560


def test_text_names_the_peak_the_error_and_what_holds_the_memory(capsys):
    assert main(["snapshot", OOM, "--text"]) == 0
    out = capsys.readouterr().out
    assert "highest allocated 18.28 GiB at entry 3,338" in out
    assert "logits and loss. It failed at the logits and the loss" in out
    assert "requested 4.64 GiB; 120.12 GiB of 138.58 GiB was free" in out
    assert "Largest holder: ForCausalLMLoss loss_utils.py:59 (from <module> snaps.py:29): 4.64 GiB" in out
    assert main(["snapshot", STEP, OOM]) == 0
    assert capsys.readouterr().out.startswith(f"from {STEP} to {OOM}"), "text, without a terminal"


def test_a_file_or_device_that_is_none_or_no_snapshot_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "nothing"
    path.write_bytes(b"")
    for words in ((str(path), "--json"), (str(tmp_path / "missing"), "--json"), (str(tmp_path),), (OOM, "--device=3")):
        assert main(["snapshot", *words]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "no device 3" in captured.err
    path = tmp_path / "notes.txt"
    path.write_text("nothing")
    assert main(["oom", str(path)]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err[:7], err.count("\n")) == ("", "ftmon: ", 1)
    assert "Traceback" not in err


def test_a_snapshot_without_anything_in_it_is_told_as_that(tmp_path, capsys):
    path = tmp_path / "empty.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": [[]]}))
    assert main(["snapshot", str(path), "--text"]) == 0
    assert "nothing is reserved" in capsys.readouterr().out
    assert main(["snapshot", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["oom"], told["devices"][0]["peak_index"]) == (None, -1)


def test_one_device_of_several_can_be_looked_at(tmp_path, capsys):
    allocator = CachingAllocator(device=1)
    allocator.alloc(4 * MIB)
    snapshot = allocator.snapshot()
    other = CachingAllocator()
    other.alloc(MIB)
    snapshot["segments"] += other.snapshot()["segments"]
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    assert main(["snapshot", str(path), "--json", "--device", "1"]) == 0
    assert [one["device"] for one in json.loads(capsys.readouterr().out)["devices"]] == [1]
    assert main(["snapshot", str(path), "--json"]) == 0
    assert [one["device"] for one in json.loads(capsys.readouterr().out)["devices"]] == [0, 1]


def test_a_files_own_name_does_not_write_to_the_terminal(tmp_path, capsys):
    path = tmp_path / "\x1b]0;title\x07\x1b[31mred.pickle"
    path.write_bytes(Path(STEP).read_bytes())
    for words in ([str(path)], [str(path), STEP], [STEP, str(path)]):
        assert main(["snapshot", *words]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\x07" not in out


def test_oom_prints_the_report_of_a_file_and_one_without_is_one_line_and_a_failure(capsys):
    assert main(["oom", OOM]) == 0
    text = capsys.readouterr().out
    assert "verdict: logits and loss" in text
    assert "1. Compute the loss in chunks" in text
    assert main(["oom", OOM, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["file"], found["reports"][0]["verdict"]["kind"]) == ("", OOM, "logits")
    assert found["reports"][0]["oom"]["requested_bytes"] == 4_978_638_848
    assert main(["oom", STEP]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"ftmon: {STEP}: no out-of-memory error is recorded\n"
