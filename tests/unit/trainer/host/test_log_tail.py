import unicodedata
from pathlib import Path

import pytest
from ftmon.protocol.messages.telemetry import LogLine
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import log_tail
from ftmon.trainer.host.log_tail import LogTail, offsets_after
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.logs.mkdir()
    return run


@pytest.fixture
def tail(run: RunDir) -> LogTail:
    return LogTail(run)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(log_tail.time, "monotonic", lambda: now[0])
    return now


def append(run: RunDir, name: str, data: bytes) -> None:
    with (run.logs / name).open("ab") as file:
        file.write(data)


def texts(lines: list[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_lines_carry_their_rank_and_stream_and_other_files_are_left_alone(run):
    append(run, "rank-12.out", b"step 1\n")
    append(run, "rank-0.err", b"warning\n")
    append(run, "launcher.log", b"launching\n")
    append(run, "hub.log", b"mine\n")
    append(run, "rank-x.out", b"not a rank\n")
    append(run, "rank-1.out", b"one\r\n\x1b[31mred\x1b[0m \x1b]0;title\x07plain\n")
    found = {(line.rank, line.stream, line.text) for line in LogTail(run).poll()}
    ours = {(12, "out", "step 1"), (0, "err", "warning"), (-1, "launcher", "launching")}
    assert found == {*ours, (1, "out", "one"), (1, "out", "red plain")}


def test_a_line_is_given_once_when_it_is_whole_or_after_a_while_and_at_the_end_of_the_run(run, tail, clock):
    append(run, "rank-0.out", b"first\nsec")
    assert texts(tail.poll()) == ["first"]
    append(run, "rank-0.out", b"ond\n")
    assert texts(tail.poll()) == ["second"]
    assert tail.poll() == []
    append(run, "rank-0.out", b"Continue? [y/n] ")
    assert tail.poll() == []
    clock[0] += log_tail.PARTIAL_S
    assert texts(tail.poll()) == ["Continue? [y/n]"]
    append(run, "rank-0.out", b"last words")
    assert texts(tail.poll(last=True)) == ["last words"]


def test_a_progress_bar_counts_by_its_last_state(run, tail, clock):
    for percent in range(0, 90, 3):
        append(run, "rank-0.err", f"\r{percent:3d}%|###| loss 1.2".encode())
    assert texts(tail.poll()) == [" 87%|###| loss 1.2"]
    append(run, "rank-0.err", b"\r 90%|###| loss 1.1")
    assert tail.poll() == [], "a moving bar is not a line for every state"
    clock[0] += log_tail.BAR_S
    assert texts(tail.poll()) == [" 90%|###| loss 1.1"]
    append(run, "rank-0.err", b"\r100%|###| loss 1.0\nsaved\n")
    assert texts(tail.poll()) == ["100%|###| loss 1.0", "saved"]
    clock[0] += log_tail.BAR_S
    append(run, "rank-0.err", b"\r 50%\r100%")
    assert texts(tail.poll()) == ["100%"]
    append(run, "rank-0.err", b"\n")
    assert tail.poll() == [], "it ends as it was last shown"


def test_bars_below_each_other_are_one_bar_and_lines_between_them_stay(run, tail, clock):
    up = "\x1b[A"
    for step in range(30):
        append(run, "rank-0.err", f"\rtrain {step}/30\n\rshard {step}/30{up}\n\n\rfiles {step}/30{up}{up}".encode())
        clock[0] += 0.05
    append(run, "rank-0.err", b"\rsaved at step 30\n\rtrain 30/30\nall done\n")
    assert texts(tail.poll(last=True)) == ["saved at step 30", "train 30/30", "all done"]


def test_a_huge_line_is_cut_and_the_next_one_is_whole(run, tail):
    append(run, "rank-0.out", b"x" * 300_000)
    (line,) = tail.poll()
    assert len(line.text) == log_tail.LINE_LIMIT
    assert line.text.endswith("(cut)")
    append(run, "rank-0.out", b"x" * 300_000 + b"\nnext\n")
    assert texts(tail.poll()) == ["next"]


def test_a_flood_of_lines_loses_its_middle_and_a_backlog_of_many_mebibytes_is_skipped(run, tail):
    append(run, "rank-0.out", b"".join(b"line %d\n" % number for number in range(5000)))
    found = texts(tail.poll())
    assert found[0] == "line 0"
    assert found[-1] == "line 4999"
    assert found[len(found) // 2] == f"... {5000 - (len(found) - 1)} lines skipped"
    assert len(found) <= log_tail.LINES_A_POLL + 1
    append(run, "rank-0.out", (b"z" * 99 + b"\n") * 80_000 + b"end\n")
    found = texts(tail.poll())
    assert found[0].endswith("of output skipped")
    assert found[-1] == "end"
    assert all(set(text) <= {"z"} for text in found[1:-1] if not text.startswith("...")), "no torn line"


def test_a_truncated_or_replaced_file_is_read_from_its_beginning(run, tail):
    append(run, "rank-0.out", b"before the cut\n")
    tail.poll()
    (run.logs / "rank-0.out").write_bytes(b"anew\n")
    assert texts(tail.poll()) == ["anew"]
    (run.logs / "rank-0.out").rename(run.logs / "rank-0.out.1")
    append(run, "rank-0.out", b"another file, longer\n")
    assert texts(tail.poll()) == ["another file, longer"]


def test_a_new_hub_goes_on_behind_the_last_recorded_line(run):
    append(run, "rank-0.out", b"a\nb\nc\nd\n")
    append(run, "rank-1.err", b"never read before\n")
    offsets = offsets_after(run, [LogLine(0, 1.0, "out", "a"), LogLine(0, 1.0, "out", "b")])
    found = LogTail(run, offsets).poll()
    assert [(line.rank, line.text) for line in found] == [(0, "c"), (0, "d"), (1, "never read before")]
    assert offsets_after(run, [LogLine(0, 1.0, "out", "not in the file")]) == {"rank-0.out": 8}, "its end"


@settings(max_examples=150, deadline=None)
@given(
    expected=st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=40), max_size=30
    ),
    cut=st.integers(1, 7),
)
def test_whatever_the_writes_are_cut_into_the_lines_come_out_whole(tmp_path_factory, expected, cut):
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.logs.mkdir()
    tail = LogTail(run)
    data = "".join(line + "\n" for line in expected).encode()
    (run.logs / "rank-0.out").write_bytes(b"")
    found = texts(tail.poll())
    for start in range(0, len(data), cut * 17):
        append(run, "rank-0.out", data[start : start + cut * 17])
        found += texts(tail.poll())
    assert [text.replace("�", "") for text in found] == [log_tail.sanitize(line).replace("�", "") for line in expected]


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.binary(max_size=400), max_size=8))
def test_any_bytes_give_safe_bounded_lines(tmp_path_factory, data):
    run = RunDir(tmp_path_factory.mktemp("run"))
    run.logs.mkdir()
    tail = LogTail(run)
    for piece in data:
        append(run, "rank-0.err", piece)
        for line in tail.poll():
            assert not {unicodedata.category(letter) for letter in line.text} & {"Cc", "Cs", "Zl", "Zp"}
            assert len(line.text) <= log_tail.LINE_LIMIT
    tail.poll(last=True)
