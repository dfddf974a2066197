"""Reports of runs, sweeps and CSV files: bands over ranks, pieces, files that open anywhere."""

import csv
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from ftmon.protocol.messages.telemetry import Evaluation, Step
from ftmon.protocol.messages.wire import Frame
from ftmon.protocol.recording.writer import Writer
from ftmon.protocol.sweep.rows import Ended, Entry
from ftmon.tui.cli import report
from ftmon.tui.cli.main import main
from ftmon.tui.cli.output import print_json
from ftmon.tui.report.build import chart_lines
from ftmon.tui.report.data import Chart, Curve
from ftmon.tui.report.pictures import svg
from scenes import recorded
from streams import RUN, Stream, write
from sweep_results import done, out_of_memory, planned, write_results

GIB, MIB = 1 << 30, 1 << 20


def sweep(folder: Path, name: str = "lengths", more: float = 1.0) -> Path:
    """Write a sweep over lengths on two ranks, the second of which needs 1 GiB more; the longest does not fit."""
    lengths = (256, 512, 1024, 2048, 4096)
    runs = [planned(seq, _peak(seq)) for seq in lengths]
    entries: list[Entry] = []
    for number, (seq, run) in enumerate(zip(lengths, runs, strict=True), 1):
        phases = {"optimizer": int(10 * GIB * more), "backward": int(_peak(seq) * more)}
        ranks = [{phase: size + rank * GIB for phase, size in phases.items()} for rank in range(2)]
        entries.append(done(run, 1000.0 + 60 * number, 60.0, ranks))
    entries += [out_of_memory(8192, 1400.0, 4 * GIB), Ended(1800.0, "finished")]
    return write_results(folder / f"{name}.results.jsonl", name, runs, entries, 1000.0)


def _peak(seq: int) -> int:
    return 8 * GIB + seq * 2 * MIB


@pytest.fixture
def ftmon(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    return lambda *words: (main(list(map(str, words))), *capsys.readouterr())


@pytest.fixture
def shown(ftmon) -> Callable[..., str]:
    """Run a command that must end with status 0; return its output."""

    def run(*words: object) -> str:
        status, out, err = ftmon(*words)
        assert (status, err) == (0, "")
        return out

    return run


@pytest.fixture
def sections(shown) -> Callable[..., list]:
    return lambda *words: json.loads(shown("report", *words, "--json"))["sections"]


def refused(answer: tuple[int, str, str], words: str) -> None:
    """Check that a command refused with status 2, in one line that contains ``words``."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.startswith("ftmon: ")
    assert words in err
    assert len(err.splitlines()) == 1


def test_a_sweep_is_bands_over_ranks_with_its_pieces_and_what_it_cost(tmp_path, sections):
    (section,) = sections(sweep(tmp_path), "--price", "9")
    peak = section["charts"][0]
    measured, predicted = peak["curves"]
    assert measured["xs"] == [256, 512, 1024, 2048, 4096]
    assert (measured["low"][0], measured["high"][0]) == (10.0, 11.0)
    assert predicted["predicted"]
    assert predicted["median"][-1] == 16.0
    assert [8192, "out of memory"] in peak["marks"]
    assert any(text == "crossover" and abs(x - 1024) < 8 for x, text in peak["marks"])
    assert "optimizer leads to 1,024 tokens, then backward at +2.0 MiB a token" in peak["notes"][0]
    assert ["cost", "4.00 for 2 GPUs at 9.00 a GPU hour"] in section["facts"]
    assert any(row[-1].startswith("out of memory in backward, rank 1") for row in section["table"])


def test_the_page_is_one_file_that_loads_and_runs_nothing_the_picture_has_one_chart_below_the_other(tmp_path, shown):
    path, page, picture = sweep(tmp_path, "a<script>alert(1)<"), tmp_path / "report.html", tmp_path / "report.svg"
    assert shown("report", path, "--html", page, "--svg", picture) == f"written: {page}\nwritten: {picture}\n"
    text = page.read_text()
    loads = r"(?i)<(script|link|iframe|object|embed|img)\b|<[^>]*\s(src|href|xlink:href|data|action)\s*=|@import|url\("
    assert not re.search(loads, text)
    drawings = [ElementTree.fromstring(drawing) for drawing in re.findall(r"(?s)<svg.*?</svg>", text)]
    assert len(drawings) == 2
    assert all(drawing.findall("polyline") for drawing in drawings), "a curve"
    assert drawings[0].findall("polygon"), "the band over ranks"
    root = ElementTree.parse(picture).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert {element.tag for element in root.iter()} & {f"{name}script", f"{name}image", f"{name}use"} == set()
    drawings = root.findall(f"{name}svg")
    assert len(drawings) == 2
    ends = [int(one.attrib["y"]) + int(one.attrib["height"]) for one in drawings]
    assert ends[0] < int(drawings[1].attrib["y"])
    assert ends[1] == int(root.attrib["height"])
    assert all(drawing.findall(f"{name}polyline") for drawing in drawings), "a curve in each"


def test_a_run_is_shown_by_step_and_by_phase(tmp_path, shown, sections):
    path = recorded(tmp_path / "recording.sqlite", 2, steps=20)
    (section,) = sections(path)
    memory, times, *_ = section["charts"]
    assert (memory["x_name"], times["unit"]) == ("step", "ms")
    assert [curve["name"] for curve in memory["curves"]] == ["allocated", "reserved"]
    assert len(times["curves"][0]["xs"]) == 20
    assert {row[0] for row in section["table"]} >= {"forward", "backward", "optimizer"}
    out = shown("report", path, "--ascii")
    assert out.isascii()
    assert "memory peak of a step, GiB, by step" in out


def learning(path: Path) -> Path:
    """Record two ranks with losses of 2 over 300 labels and of 4 over 100; one loss is NaN in the steps 7 and 8."""
    frames = []
    for frame in Stream(ranks=2, steps=20, logs=False, devices=False).frames():
        if isinstance(step := frame.message, Step):
            loss = float("nan") if step.rank and step.step in (7, 8) else 2.0 + 2 * step.rank
            labels = 100 if step.rank else 300
            known = msgspec.structs.replace(step, loss=loss, label_tokens=labels, lr=1e-6 * step.step)
            frame = msgspec.structs.replace(frame, message=known)
        frames.append(frame)
    last = frames[-1]
    results = [(10, 9.0, 0.1), (10, 3.0, 0.5), (20, 2.75, 0.75)]
    sent = [Evaluation(0, step, last.t, "chats", loss, metrics={"accuracy": share}) for step, loss, share in results]
    return write(path, [*frames, *(Frame(last.seq + number, last.t, one) for number, one in enumerate(sent, 1))])


def test_a_run_has_its_loss_learning_rate_and_evaluations(tmp_path, shown, sections):
    path, picture, page = (tmp_path / name for name in ("recording.sqlite", "charts.svg", "report.html"))
    (section,) = sections(learning(path))
    loss, rate, accuracy = section["charts"][2:]
    training, evaluation = loss["curves"]
    assert training["median"] == [2.0 if step in (7, 8) else pytest.approx(2.5) for step in range(1, 21)]
    assert (training["low"], training["high"][:7]) == ([2.0] * 20, [4.0] * 6 + [2.0])
    assert (evaluation["name"], evaluation["xs"]) == ("evaluation chats", [10, 20])
    assert evaluation["median"] == [3.0, 2.75], "the last result of a step"
    assert loss["marks"] == [[7, "loss not finite"]]
    assert section["notes"] == ["loss not finite in 2 steps, first in step 7"]
    assert rate["curves"][0]["median"] == pytest.approx([1e-6 * step for step in range(1, 21)])
    assert (accuracy["title"], accuracy["curves"][0]["median"]) == ("evaluation: accuracy", [0.5, 0.75])
    out = shown("report", path, "--ascii").splitlines()
    expected = ["loss, by step", "learning rate, by step", "evaluation: accuracy, by step"]
    assert [line for line in out if line.endswith(", by step")][2:] == expected
    assert "  loss not finite at 7" in out
    shown("report", path, "--svg", picture, "--html", page)
    for text in (picture.read_text(), page.read_text()):
        assert {"loss", "learning rate", "evaluation: accuracy"} <= set(re.findall(r'aria-label="([^"]*)"', text))


def test_a_comparison_names_a_loss_that_became_nan(tmp_path, capsys):
    known, lost = (tmp_path / name / "recording.sqlite" for name in ("known", "lost"))
    for path in (known, lost):
        path.parent.mkdir()
    recorded(known, 2, steps=20)
    learning(lost)
    assert main(["compare", str(known), str(lost), "--gate", "95%"]) == 1
    out = capsys.readouterr().out
    assert "  loss not finite: in 0 -> 2 steps\n" in out
    assert "regression: loss not finite in 2 steps" in out
    main(["compare", str(lost), str(known), "--gate", "95%"])
    out = capsys.readouterr().out
    assert "  loss not finite: in 2 -> 0 steps\n" in out
    assert "regression: loss" not in out


def test_runs_of_the_same_figures_share_their_charts_of_loss(tmp_path, sections):
    together = sections(*[learning(tmp_path / f"{name}.sqlite") for name in ("one", "other")])[0]
    assert together["title"] == "in one picture"
    charts = {chart["title"]: chart for chart in together["charts"]}
    assert len(charts["loss"]["curves"]) == 4
    assert charts["loss"]["from_zero"] is False


def test_measurements_of_others_stand_in_the_same_picture(tmp_path, sections):
    path = tmp_path / "theirs.csv"
    lines = ["seq_len,gpu_0_allocated_mib,gpu_1_allocated_mib"]
    lines += [f"{seq},{8192 + 2 * seq},{9216 + 2 * seq}" for seq in (512, 1024, 2048)]
    path.write_text("\n".join(lines) + "\n")
    together, *_ = sections(sweep(tmp_path), path)
    assert together["title"] == "in one picture"
    names = [curve["name"] for curve in together["charts"][0]["curves"]]
    assert names == ["lengths", "lengths predicted", "theirs allocated"]
    theirs = together["charts"][0]["curves"][2]
    assert (theirs["low"][0], theirs["high"][0]) == (9.0, 10.0)
    assert sections(path, "--columns", "length=seq_len,allocated=gpu_{rank}_allocated_mib,unit=MiB")


def test_a_file_without_a_header_is_drawn_with_its_rate_and_what_ran_out_of_memory(tmp_path, sections, shown):
    path, out = tmp_path / "results.csv", tmp_path / "rows.csv"
    rows = [(seq, 4096 + seq, 8192 + seq, 512 / seq) for seq in (512, 1024)]
    lines = [f"{x}, {own}, {kept}, 0, 0, {its}\n{x}, 0, 0, {own}, {kept}, {its}\n" for x, own, kept, its in rows]
    path.write_text("".join([*lines, "2048, OOM\n"]))
    (section,) = sections(path)
    assert dict(section["facts"])["measurements"] == "4 of 2 ranks, sequence length 512 to 1,024"
    expected = [("memory peak", "GiB"), ("reserved memory", "GiB"), ("rate", "iterations/s")]
    assert [(each["title"], each["unit"]) for each in section["charts"]] == expected
    memory, _, rate = section["charts"]
    assert memory["curves"][0]["low"] == memory["curves"][0]["high"] == [4.5, 5.0]
    assert (rate["curves"][0]["median"], rate["notes"]) == ([1.0, 0.5], [])
    assert memory["marks"] == rate["marks"] == [[2048.0, "out of memory"]]
    assert "micro_batch 512 to" in shown("report", path, "--columns", "length=micro_batch")
    shown("report", path, "--csv", out)
    *measured, failed = csv.DictReader(out.open())
    seen = [(one["rank"], one["allocated_bytes"], one["its"]) for one in measured][:2]
    assert seen == [("0", str(4608 << 20), "1.0"), ("1", str(4608 << 20), "1.0")]
    assert (failed["sequence_length"], failed["verdict"], failed["rank"]) == ("2048", "out-of-memory", "")


def test_the_rows_are_one_line_a_rank_and_phase_in_csv_and_parquet(tmp_path, shown):
    out = tmp_path / "rows.csv"
    shown("report", sweep(tmp_path), "--csv", out)
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 5 * 2 * 2 + 1
    assert {row["phase"] for row in rows} == {"optimizer", "backward", ""}
    first = next(row for row in rows if (row["seq"], row["rank"], row["phase"]) == ("4096", "1", "backward"))
    assert int(first["allocated_peak_bytes"]) == _peak(4096) + GIB
    assert int(first["predicted_peak_bytes"]) == _peak(4096)
    assert (rows[-1]["verdict"], int(rows[-1]["asked_bytes"])) == ("out-of-memory", 4 * GIB)
    parquet = pytest.importorskip("pyarrow.parquet")
    shown("report", sweep(tmp_path), "--parquet", out.with_suffix(".parquet"))
    table = parquet.read_table(out.with_suffix(".parquet"))
    assert (table.num_rows, "allocated_peak_bytes" in table.column_names) == (len(rows), True)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        ("a,b\n1,2\n", (), "no column looks like a length among a, b"),
        ("seq,allocated_mib\n1,x\n", (), "line 2, column allocated_mib: 'x' is no number"),
        ("", (), "is empty, or has no header in its first line\n"),
        ("seq;allocated_mib\n1;2\n", (), "are separated by semicolons, not by commas: write it with commas\n"),
        ("seq,p\n1,2\n", ("--columns", "allocated=p"), "--columns needs length=COLUMN"),
        ("seq,p\n1,2\n", ("--columns", "length=seq,allocated=p,unit=MB/s"), "unit must be one of"),
        ("seq,p\n1,2\n", ("--columns", "length=seq,allocated=p,allocated=q"), "allocated is given twice"),
    ],
)
def test_a_csv_that_does_not_match_is_one_line_and_nothing_is_written(tmp_path, ftmon, content, options, words):
    path, page = tmp_path / "their.csv", tmp_path / "out.html"
    path.write_text(content)
    refused(ftmon("report", path, "--html", page, *options), words)
    assert not page.exists()


@pytest.mark.parametrize("command", ["report", "compare"])
@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("nope.csv", None, "nope.csv: no such file"),
        ("nope/recording", None, "nope/recording: no such file"),
        ("nope.results.jsonl", None, "nope.results.jsonl: no such file"),
        ("bad.results.jsonl", "garbage\n", "bad.results.jsonl: is not a results file of a sweep"),
        ("bad.sqlite", "garbage\n", "bad.sqlite: is not an ftmon recording"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_2(tmp_path, ftmon, monkeypatch, command, name, content, words):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    refused(ftmon(command, name, *([name] if command == "compare" else [])), f"ftmon: {words}")


def test_csv_files_are_not_compared_and_runs_without_a_measured_step_neither_compared_nor_written(tmp_path, ftmon):
    path, rows = tmp_path / "their.csv", tmp_path / "rows.csv"
    path.write_text("seq,allocated_mib\n1,2\n")
    refused(ftmon("compare", path, path), "CSV files are not compared; 'ftmon report")
    run = recorded(tmp_path / "recording.sqlite", 2, steps=3)
    for options in ((), ("--json",), ("--gate", "3%")):
        refused(ftmon("compare", run, run, "--warm-up", "3", *options), "ftmon: nothing to compare: ")
    refused(ftmon("report", run, "--warm-up", "3", "--csv", rows), "no measured steps")
    assert not rows.exists()


def test_an_empty_recording_took_no_time_and_cost_nothing(tmp_path, sections):
    path = tmp_path / "recording.sqlite"
    Writer(path, RUN).close()
    (section,) = sections(path, "--price", "9")
    assert "-" not in dict(section["facts"])["time"]
    assert dict(section["facts"])["state"] == "lost", "as 'ftmon status' has it"
    assert dict(section["facts"])["cost"].startswith("0.00")


@pytest.mark.parametrize("option", ["--json", "--csv", "--html", "--svg"])
def test_names_that_are_not_utf_8_are_shown_with_a_mark_and_exact_in_json(tmp_path, shown, capsys, option):
    paths = [tmp_path / os.fsdecode(name) for name in (b"m\xff.csv", b"n\xff.csv")]
    for path in paths:
        path.write_text("seq,allocated_mib\n1,2\n2,3\n")
    made = tmp_path / "made"
    out = shown("report", *paths, option, *([] if option == "--json" else [made]))
    assert "m\ufffd" in (json.loads(out)["title"] if option == "--json" else made.read_text())
    for indent in (False, True):
        print_json({"path": "m\udcff"}, indent=indent)
        assert json.loads(capsys.readouterr().out) == {"path": "m\udcff"}


def test_the_ticks_of_a_short_axis_are_its_values_and_a_name_too_long_for_a_file_is_none(tmp_path, ftmon, monkeypatch):
    chart = Chart("t", "step", "ms", [Curve("", [1.0, 2.0, 3.0, 4.0], [1.0] * 4, [1.0] * 4, [1.0] * 4)])
    axis = [line.split() for line in chart_lines(chart, 60) if line.split()[:1] == ["1"]]
    assert axis == [["1", "2", "3", "4"]]
    monkeypatch.setenv("FTMON_HOME", str(tmp_path))
    name = "x" * 300
    for words in (["report", f"{name}.csv"], ["compare", f"{name}.csv", "b"], ["run", "--join", name, "--", "true"]):
        _, out, err = ftmon(*words)
        assert out == ""
        assert err.startswith("ftmon: ")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("low", "high"), [(-2.0, 3.0), (-1e-9, -1e-10), (7.0, 7.0), (0.0, 0.0), (1e30, 1e30), (-1e30, 1e30), (2.31, 2.33)]
)
@pytest.mark.parametrize("from_zero", [True, False])
def test_every_value_is_inside_its_chart(low, high, from_zero):
    curve = Curve("", [1.0, 2.0], [low, high], [low, high], [low, high])
    chart = Chart("loss", "step", "", [curve], from_zero=from_zero)
    drawn = ElementTree.fromstring(svg(chart))
    heights = [float(line.attrib["y1"]) for line in drawn.findall("line") if line.attrib.get("class") == "grid"]
    assert 2 <= len(heights) < 14
    places = [float(dot.attrib["cy"]) for dot in drawn.findall("circle")]
    assert all(min(heights) <= y <= max(heights) for y in places)
    assert len(set(places)) == len({low, high})
    assert sum("⠁" <= sign <= "⣿" for line in chart_lines(chart, 60) for sign in line) > 10


@pytest.mark.parametrize("xs", [[1e20], [1e16, 1e16 + 2], [1e16, 1e16 + 2e10], [0.0], [1.0, 2.0]])
def test_an_axis_of_huge_values_ends(xs):
    ones = [1.0] * len(xs)
    drawn = svg(Chart("t", "x", "GiB", [Curve("", xs, ones, ones, ones)]))
    assert len(ElementTree.fromstring(drawn).findall("circle")) == len(xs)
    assert drawn.count("<text") < 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--csv", "their.csv"), "--csv: their.csv would replace a file that is read"),
        (("--html", "./link.csv"), "--html: ./link.csv would replace a file that is read"),
        (("--svg", "made", "--csv", "made"), "--csv: made would replace a file that is read or written"),
        (("--svg", "made", "--csv", "none/rows.csv"), "--csv: none/rows.csv cannot be written: no such folder"),
        (("--svg", "made", "--csv", "."), "--csv: . is a folder"),
        (("--svg", "made", "--csv", ""), "--csv: needs a file's name"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_any_is(tmp_path, ftmon, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    content = "seq,allocated_mib\n1,2\n"
    Path("their.csv").write_text(content)
    Path("link.csv").symlink_to("their.csv")
    refused(ftmon("report", "their.csv", *options), f"ftmon: {words}")
    assert Path("their.csv").read_text() == content
    assert not Path("made").exists()


def test_compare_gates_sweeps_and_runs_and_shows_configurations_that_differ(tmp_path, ftmon, shown, monkeypatch):
    before, after = sweep(tmp_path, "before"), sweep(tmp_path, "after", 1.03)
    status, out, _ = ftmon("compare", before, after, "--gate", "3%")
    assert status == 1
    assert "regression: highest peak +2." in out
    assert "5 of 6 regressed" in out
    assert shown("compare", before, before, "--gate", "3%")
    assert shown("compare", before, after), "without a gate nothing is wrong"
    run = recorded(tmp_path / "recording.sqlite", 2, steps=20)
    (comparison,) = json.loads(shown("compare", run, run, "--gate", "0.03", "--json"))["comparisons"]
    assert {one["name"] for one in comparison["differences"]} >= {"step time", "highest peak", "reserved", "loss"}
    refused(ftmon("compare", run, before), "compare two runs or two sweeps")
    _, every, _ = ftmon("compare", before, after, "--gate", "3%")
    monkeypatch.setattr(report, "_MOST", 5)
    _, some, _ = ftmon("compare", before, after, "--gate", "3%")
    assert every.count(" -> ") == 6
    assert some.count(" -> ") == some.count("regression: ") == 5
    assert "not shown, equal within their noise: 1 of 6; --json has them" in some
    _, none, _ = ftmon("compare", before, before)
    assert none == "not shown, equal within their noise: 6 of 6; --json has them\n6 configurations compared\n"


def evaluated(path: Path, steps: int, every: int) -> Path:
    """Record a run with evaluations, whose loss is 1 and a hundredth of their step."""
    frames = list(Stream(ranks=2, steps=steps).frames())
    ends = [(frame.t, frame.message.step) for frame in frames if isinstance(frame.message, Step)]
    results = [(t, Evaluation(0, step, t, "chats", 1 + step / 100)) for t, step in ends if step % every == 0]
    after = frames[-1].seq
    frames += [Frame(after + number, frames[-1].t, each) for number, (_, each) in enumerate(results, 1)]
    path.parent.mkdir()
    return write(path, frames)


def test_runs_of_different_lengths_are_compared_over_their_common_steps(tmp_path, shown):
    short = evaluated(tmp_path / "short" / "recording.sqlite", 40, every=8)
    long = evaluated(tmp_path / "long" / "recording.sqlite", 90, every=16)
    words = "steps 6 to 40 of both (the first run has 40 steps, the second 90); evaluation after step 32"
    assert shown("compare", short, long).splitlines()[1] == f"  {words}"
    (comparison,) = json.loads(shown("compare", short, long, "--json"))["comparisons"]
    figures = {one["name"]: (one["before"]["value"], one["after"]["value"]) for one in comparison["differences"]}
    assert figures["evaluation loss"] == (1.32, 1.32)
    for name in ("loss", "step time", "highest peak", "throughput"):
        assert figures[name][0] == pytest.approx(figures[name][1]), name
    steps = {"first": 6, "last": 40, "before_last": 40, "after_last": 90, "evaluation": 32}
    assert comparison["steps"] == {**steps, "data_compared": 0, "data_differ_from": None}


@pytest.mark.parametrize(
    ("changed", "told"),
    [(0, "; the same data"), *((step, f"; their data differ from step {step} on") for step in (3, 30))],
)
def test_the_step_from_which_two_runs_train_on_other_data_is_told(tmp_path, ftmon, changed, told):
    paths = [tmp_path / "before.sqlite", tmp_path / "after.sqlite"]
    for path, moved in zip(paths, (0, changed), strict=True):
        frames = []
        for frame in Stream(ranks=2, steps=40).frames():
            if isinstance(frame.message, Step):
                number = frame.message.step
                data = number + (1000 if moved and number >= moved and frame.message.rank else 0)
                frame = msgspec.structs.replace(frame, message=msgspec.structs.replace(frame.message, batch_id=data))
            frames.append(frame)
        write(path, frames)
    _, out, _ = ftmon("compare", *map(str, paths))
    assert out.splitlines()[1] == f"  steps 6 to 40 of both{told}"


def test_a_resumed_run_is_compared_from_its_first_step_on(tmp_path, ftmon, shown):
    frames = list(Stream(ranks=1, steps=50).frames())

    def part(name: str, kept: range) -> Path:
        found = [each for each in frames if not isinstance(each.message, Step) or each.message.step in kept]
        return write(tmp_path / f"{name}.sqlite", found)

    whole, resumed = part("whole", range(51)), part("resumed", range(31, 51))
    assert "  steps 36 to 50 of both" in shown("compare", whole, resumed).splitlines()
    refused(ftmon("compare", part("earlier", range(31)), resumed), "have no measured steps in common")


@pytest.mark.parametrize(
    ("moved", "told"), [(range(31, 32), "; the same data"), (range(31, 99), "; their data differ from step 31 on")]
)
def test_batches_that_a_resumed_loop_has_skipped_before_its_first_step_are_no_other_data(tmp_path, ftmon, moved, told):
    paths = [tmp_path / "whole.sqlite", tmp_path / "resumed.sqlite"]
    for path, first in zip(paths, (1, 31), strict=True):
        frames = []
        for frame in Stream(ranks=1, steps=50).frames():
            if isinstance(frame.message, Step):
                number = frame.message.step
                if number < first:
                    continue
                data = number + 1000 * (first > 1 and number in moved)
                frame = msgspec.structs.replace(frame, message=msgspec.structs.replace(frame.message, batch_id=data))
            frames.append(frame)
        write(path, frames)
    _, out, _ = ftmon("compare", *map(str, paths))
    assert out.splitlines()[1] == f"  steps 36 to 50 of both{told}"


def test_a_png_is_refused_without_its_package_and_nothing_is_written(tmp_path, ftmon, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)  # as if it were not installed
    path = tmp_path / "charts.png"
    words = "ftmon: --png needs resvg-py: pip install 'ftmon[png]'; or write --svg FILE"
    refused(ftmon("report", sweep(tmp_path), "--png", path), words)
    assert not path.exists()


def test_a_png_has_the_charts_with_their_text(tmp_path, shown):
    library = pytest.importorskip("resvg_py")
    path, picture = tmp_path / "charts.png", tmp_path / "charts.svg"
    assert f"written: {path}" in shown("report", sweep(tmp_path), "--png", path, "--svg", picture)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    size = ElementTree.fromstring(picture.read_text()).attrib
    seen = [int.from_bytes(content[at : at + 4], "big") for at in (16, 20)]
    assert seen == [2 * int(size["width"]), 2 * int(size["height"])]
    without_text = bytes(library.svg_to_bytes(svg_string=picture.read_text(), zoom=2.0, skip_system_fonts=True))
    assert content != without_text
