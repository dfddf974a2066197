"""Stacks as rows: who is at the same place, and all threads where they are wanted."""

from ftmon.protocol.messages.control import Result
from ftmon.protocol.messages.telemetry import Stacks
from ftmon.tui.cli.ranks import as_json, as_lines
from ftmon.tui.model.rank import rows
from scenes import STACKS, WAITS


def taken(rank: int, text: str, **fields: str) -> Stacks:
    return Stacks(rank, 1.0, text, **fields)


ALL = {rank: taken(rank, STACKS if rank == 3 else WAITS) for rank in range(8)}


def test_ranks_at_the_same_place_are_one_group_and_the_command_says_who_did_not_answer():
    heads = [row for row in rows(ALL) if row.kind == "group"]
    assert [row.text for row in heads] == [
        "7 ranks (0-2, 4-7): all_gather_into_tensor in stage3.py:582 in fetch",
        "rank 3: next() of the dataloader in train.py:41 in main",
    ]
    assert heads[0].ranks == (0, 1, 2, 4, 5, 6, 7)
    assert rows({}) == []
    answers = {"0": {"text": WAITS, "thread": ""}, "1": {"text": WAITS, "thread": ""}, "2": {}}
    result = Result("1", False, "stacks", "stacks of ranks 0, 1; rank 2: its process is gone", {"answers": answers})
    lines = as_lines(result)
    assert lines[0] == "2 ranks (0-1): all_gather_into_tensor in stage3.py:582 in fetch"
    assert lines[1] == "    distributed_c10d.py:3843 in all_gather_into_tensor"
    assert lines[-1].endswith("rank 2: its process is gone")
    found = as_json(result)
    assert (found["groups"][0]["ranks"], found["groups"][0]["doing"]) == ([0, 1], "collective")
    assert found["groups"][0]["frames"][-1]["file"] == "/home/user/train.py"


def test_an_unfolded_group_has_all_threads_and_native_frames_and_a_rank_that_could_not_answer_is_told():
    native = {3: taken(3, "Thread 1 (idle): python\n    poll (libc.so.6)", taken_by="py-spy")}
    folded, unfolded = rows(ALL), rows(ALL, native, {3})
    assert not any("threading.py" in row.text for row in folded)
    assert any("threading.py" in row.text for row in unfolded)
    assert [row.text for row in unfolded if row.kind == "native"] == ["Thread 1 (idle): python", "    poll (libc.so.6)"]
    (head, *_) = rows({0: taken(0, WAITS, taken_by="signal")})
    assert head.text.endswith("(could not answer: native code holds Python's lock)")
