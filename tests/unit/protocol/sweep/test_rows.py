"""The results file of a sweep: rows survive a torn line, and other people's files are refused."""

import json
import signal
from pathlib import Path

import pytest
from ftmon.protocol.host.process import ProcessId
from ftmon.protocol.sweep.rows import FORMAT, Ended, Header, Plan, ResultsError, Row, Started, Writer, key_of, read
from ftmon.trainer.sweep import plan
from ftmon.trainer.sweep.__main__ import main


def test_only_rows_of_its_own_plan_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # main() handles signals of this process
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text("command: python {seq}\naxes: {seq: [8, 16]}\n")
    wanted = plan.read("s.yaml")
    writer = Writer(Path("s.results.jsonl"), Header(FORMAT, "s", "", plan.fingerprint(wanted), ["seq"], 3, 2, 0.0))
    for seq in (8, 16, 32, 64):
        writer.append(Row({"seq": seq}, "out-of-memory", 1.0))
    writer.close()
    assert main(["s.yaml"]) == 0
    assert "2 runs have their rows already" in capsys.readouterr().out


ME = ProcessId(1, 1)


def header(fingerprint: str = "a") -> Header:
    return Header(FORMAT, "lengths", "lengths.yaml", fingerprint, ["seq"], 3, 2, 0.0)


def written(path: Path) -> Path:
    writer = Writer(path, header())
    for entry in (
        Plan(100.0, ME, []),
        Started(101.0, {"seq": 8}),
        Row({"seq": 8}, "done", 110.0, seconds=9),
        Started(111.0, {"seq": 16}, run="/runs/lost"),
    ):
        writer.append(entry)
    writer.close()
    return path


def test_a_session_that_was_killed_loses_the_run_without_a_row(tmp_path):
    path = written(tmp_path / "r.jsonl")
    with path.open("ab") as file:
        file.write(b'{"type":"row","settings":{"seq":16},"verd')
    results = read(path)
    assert [row.settings for row in results.rows] == [{"seq": 8}]
    assert results.running.run == "/runs/lost"
    writer = Writer(path, header())
    writer.append(Plan(200.0, ME, []))
    writer.append(Row({"seq": 32}, "unfinished", 201.0, text="budget"))
    writer.append(Ended(207.0, "finished"))
    writer.close()
    after = read(path)
    assert after.running is None
    assert after.seconds_used() == 11 + 7, "the time between two sessions is not the sweep's"
    assert list(after.answered()) == [(key_of({"seq": 8}), 0)], "a run that the sweep ended itself is no answer"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"seq,peak\n1,2\n", "is not a results file of a sweep"), (b"", "is not a results file"),
     (b'{"type":"sweep","format":9}\n', "has results of format 9, this version reads 1")],
)  # fmt: skip
def test_other_files_are_refused_in_one_line(tmp_path, content, reason):
    path = tmp_path / "r.jsonl"
    path.write_bytes(content)
    with pytest.raises(ResultsError, match=reason) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("place", ["settings", "peak"])
def test_a_number_that_no_run_has_is_refused_with_its_line(tmp_path, place):
    path = written(tmp_path / "r.jsonl")
    line = path.read_text().count("\n") + 1
    figures = {"allocated_peak_bytes": 10**400 if place == "peak" else 1}
    settings, ranks = {"a": 10**400 if place == "settings" else 1}, [{"rank": 0, "phases": {"forward": figures}}]
    row = {"type": "row", "settings": settings, "verdict": "done", "time": 1.0, "ranks": ranks}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    with pytest.raises(ResultsError, match=rf"r\.jsonl:{line}: is no entry of a results file") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_two_sweeps_do_not_write_one_file(tmp_path):
    path = written(tmp_path / "r.jsonl")
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"results of another sweep.*--output"):
        Writer(path, header("b"))
    assert path.read_bytes() == before
    writer = Writer(path, header())
    with pytest.raises(ResultsError, match="another sweep is writing it"):
        Writer(path, header())
    writer.close()
    Writer(path, header()).close()


def test_settings_are_named_whatever_their_order_and_true_is_not_1():
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": True})
