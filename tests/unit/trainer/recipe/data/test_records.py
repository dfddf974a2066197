"""Files of every kind and data sets of the hub: their records, places and splits, and what cannot be read."""

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data, File
from ftmon.trainer.recipe.data.messages import RefusedError
from ftmon.trainer.recipe.data.records import Records, read_records
from pyarrow import parquet

ROWS = [{"prompt": "a", "response": "b"}, {"prompt": "c, with comma", "response": 'two\nlines "quoted"'}]


def read(path: Path, **data: Any) -> Records:
    return read_records(Config(data=Data(path=str(path), **data)))


def write(path: Path) -> None:
    match path.suffix:
        case ".jsonl":
            path.write_text("\n" + "\n".join(map(json.dumps, ROWS)))
        case ".json":
            path.write_text(json.dumps(ROWS, indent=1))
        case ".parquet":
            parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        case suffix:
            text = 'prompt,response\na,b\n"c, with comma","two\nlines ""quoted"""\n'
            text = text.replace(",", "\t").replace("c\t", "c,") if suffix == ".tsv" else text
            path.write_text(text, encoding="utf-8-sig")


@pytest.mark.parametrize(
    ("suffix", "first", "second"),
    [("jsonl", 2, 3), ("json", "record 1", "record 2"), ("csv", 2, 3), ("tsv", 2, 3), ("parquet", "row 1", "row 2")],
)
def test_each_kind_of_file_is_read_with_the_place_of_each_record(tmp_path, suffix, first, second):
    path = tmp_path / f"data.{suffix}"
    write(path)
    records = read(path)
    assert [record for _, record in records] == ROWS
    assert [records.place(index) for index in range(2)] == [f"{path.name}:{first}", f"{path.name}:{second}"]
    assert len(read(path, limit=1)) == 1


def test_a_text_file_has_a_text_a_line_nulls_of_arrow_are_left_out_and_files_follow_each_other(tmp_path):
    (tmp_path / "data.txt").write_bytes(b"one\r\n\n  \ntwo")
    records = read(tmp_path / "data.txt")
    assert [record for _, record in records] == [{"text": "one"}, {"text": "two"}]
    assert records.place(1) == "data.txt:4"
    (source,) = records.sources
    assert source.blank == ["data.txt:2", "data.txt:3"]
    calls = [[{"name": "f", "arguments": {"a": 1}}], [{"name": "g", "arguments": {"b": "x"}}]]
    parquet.write_table(pyarrow.Table.from_pylist([{"calls": call} for call in calls]), tmp_path / "a.parquet")
    assert [record["calls"] for _, record in read(tmp_path / "a.parquet")] == calls
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    (tmp_path / "b.txt").write_text("c\n")
    files = [File(str(tmp_path / "a.jsonl")), File(str(tmp_path / "b.txt"), 0.5)]
    records = read_records(Config(data=Data(files=files)))
    assert [record["text"] for _, record in records] == ["a", "b", "c"]
    assert [records.place(index) for index in range(3)] == ["a.jsonl:1", "a.jsonl:2", "b.txt:1"]


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "index", "reason"),
    [
        (
            "a.jsonl",
            b'\xef\xbb\xbf{"text": "a"}\n{"text": \n{"text": "b"}\n',
            1,
            "is not JSON: Expecting value at column",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n', 1, "is not text in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n' + DEEP, 1, "is nested too deeply"),
        ("a.jsonl", b'{"text": %s}' % (b"9" * 5000), 0, "a number has too many digits"),
        ("a.csv", b"text\na\nb,c\n", 1, "has 2 fields, and the header 1"),
    ],
    ids=["json", "utf-8", "deep", "digits", "fields"],
)
def test_a_broken_record_is_refused_by_line_and_does_not_end_the_reading(tmp_path, name, content, index, reason):
    (tmp_path / name).write_bytes(content)
    records = read(tmp_path / name)
    with pytest.raises(RefusedError, match=reason):
        records.record(index)
    assert [number for number, _ in records] == [number for number in range(len(records)) if number != index]


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv", "data.tsv", "data.txt"])
def test_records_that_are_not_utf_8_are_refused_by_line(tmp_path, name):
    record = '{"text": "%s"}' if name == "data.jsonl" else "%s"
    lines = ["text"] * name.endswith("sv") + [record % text for text in ("one", "caf\xe9", "three")]
    (tmp_path / name).write_bytes("\n".join(lines).encode("latin-1"))
    records = read(tmp_path / name)
    assert [found["text"] for _, found in records] == ["one", "three"]
    with pytest.raises(RefusedError, match="is not text in UTF-8; convert the file"):
        records.record(1)
    for encoding in ("utf-16", "utf-16-le"):
        (tmp_path / name).write_bytes("\n".join(lines[-3:]).encode(encoding))
        with pytest.raises((RefusedError, ConfigError), match="is not text in UTF-8"):
            read(tmp_path / name).record(0)


def test_a_broken_parquet_file_is_refused_without_the_words_of_a_library(tmp_path, capfd, caplog):
    (tmp_path / "a.parquet").write_bytes(b"nothing of the kind, and long enough")
    with pytest.raises(ConfigError, match=r"data\.path: .*a\.parquet cannot be read: Parquet magic bytes not found"):
        read(tmp_path / "a.parquet")
    assert (capfd.readouterr().err, caplog.messages) == ("", [])


def test_groups_without_rows_of_a_parquet_file_are_passed_over_and_a_saved_data_set_is_refused(tmp_path):
    rows = pyarrow.table({"text": ["one", "two"]})
    for name, parts in {"a.parquet": [rows[:0], rows], "none.parquet": [rows[:0]]}.items():
        with parquet.ParquetWriter(tmp_path / name, rows.schema) as file:
            for part in parts:
                file.write_table(part)
    assert [record for _, record in read(tmp_path / "a.parquet")] == [{"text": "one"}, {"text": "two"}]
    with pytest.raises(ConfigError, match=r"none\.parquet: no records"):
        read(tmp_path / "none.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match=r"was written by save_to_disk.* as data.path"):
        read_records(Config(data=Data(name=str(tmp_path / "saved"))))


def test_a_hash_names_the_content_and_not_the_file(tmp_path):
    for name, content in (("a", "1\n2\n"), ("b", "1\n2\n"), ("c", "1\n3\n")):
        (tmp_path / f"{name}.jsonl").write_text(content)
    one, same, other = (read(tmp_path / f"{name}.jsonl").digest for name in "abc")
    assert one == same != other
    assert read(tmp_path / "a.jsonl", limit=1).digest != one


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"[1, 2", "is not JSON"),
        ("b.json", b"[]", "holds no records"),
        ("c.json", b'[{"text": "a"}, %s]' % DEEP, "is nested too deeply"),
        ("a.csv", b"", "has no header line"),
        ("b.csv", b"text,text\na,b\n", "names .text. twice"),
        ("c.csv", b'text,more\na,"b\nc"\nd,"e\nf,g\n', "line 4 has a quote that is not closed"),
        ("d.tsv", b'"text\na\n', "line 1 has a quote that is not closed"),
        ("a.jsonl", b" \n", "no records"),
    ],
    ids=["json", "empty json", "deep json", "empty csv", "names", "open quote", "open header", "blank lines"],
)
def test_a_file_that_holds_no_records_is_refused(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}.*{words}"):
        read(tmp_path / name)


def rows(split: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{split} {number}", "response": f"answer {number}"} for number in range(count)]


def write_repository(folder: Path) -> None:
    """Write a data set as a repository of the hub has it: parquet files of two configurations, named in its card."""
    card = ["---", "configs:"]
    for config in ("plain", "loud"):
        card += [f"- config_name: {config}", "  data_files:"]
        for split, count in (("train", 6), ("validation", 4)):
            path = folder / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pyarrow.Table.from_pylist(rows(f"{config} {split}", count)), path)
            card += [f"  - split: {split}", f"    path: {config}/{split}-*.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_repository(tmp_path / "words")
    return tmp_path / "words"


def hub_read(name: Path, **data: Any) -> Records:
    return read_records(Config(data=Data(name=str(name), **data)))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("subset", ["plain", "loud"])
def test_a_data_set_is_read_by_its_name_its_configuration_and_split(repository, subset, split):
    wanted = rows(f"{subset} {split}", 6 if split == "train" else 4)
    assert [record for _, record in hub_read(repository, subset=subset, split=split)] == wanted
    half = hub_read(repository, subset=subset, split=f"{split}[50%:]")
    assert [record for _, record in half] == wanted[len(wanted) // 2 :]
    assert half.digest != hub_read(repository, subset=subset, split=f"{split}[:50%]").digest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"subset": "plain", "split": "test"}, "data.name: {} cannot be read: .*test"),
        ({"subset": "quiet"}, "data.name: {} cannot be read: .*quiet"),
        ({}, "data.subset: {} has several, name one: plain, loud"),
    ],
)
def test_a_split_or_configuration_that_is_not_there_is_refused_with_those_that_are(repository, data, words):
    with pytest.raises(ConfigError) as refused:
        hub_read(repository, **data)
    assert re.fullmatch(words.format(re.escape(str(repository))) + ".*", str(refused.value))


DATES = [{"prompt": f"2024-01-0{day}", "response": f"00{day}.50"} for day in range(1, 5)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv"])
def test_a_folder_is_read_as_its_files_are_whatever_datasets_would_make_of_the_values(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "words"
    folder.mkdir()
    files = [("train-00000-of-00002", DATES[:2]), ("train-00001-of-00002", DATES[2:]), ("test", DATES[1:2])]
    for name, content in files:
        lines = [json.dumps(row) for row in content]
        if suffix.endswith("sv"):
            between = "," if suffix == "csv" else "\t"
            lines = [between.join(row) for row in (["prompt", "response"], *(row.values() for row in content))]
        (folder / f"{name}.{suffix}").write_text("\n".join(lines) if suffix != "json" else json.dumps(content))
    assert [record for _, record in hub_read(folder)] == DATES
    assert [record for _, record in hub_read(folder, split="test")] == DATES[1:2]
    assert [record for _, record in hub_read(folder, split="train[25%:]+test")] == [*DATES[1:], DATES[1]]
    assert hub_read(folder).place(2).startswith(f"train-00001-of-00002.{suffix}:")
    assert hub_read(folder, split="train[:50%]").digest != hub_read(folder, split="train[50%:]").digest
    with pytest.raises(ConfigError, match=r"data\.split: valid: Unknown split .valid.*train"):
        hub_read(folder, split="valid")


def test_a_folder_of_two_kinds_of_files_of_which_datasets_reads_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "words").mkdir()
    for number in range(2):
        (tmp_path / "words" / f"{number}.jsonl").write_text('{"text": "red"}\n')
    (tmp_path / "words" / "more.csv").write_text("text\nblue\n")
    with pytest.raises(ConfigError, match=r"its \.jsonl files alone, not more\.csv; name all in data\.files"):
        hub_read(tmp_path / "words")


def test_a_folder_with_settings_for_datasets_is_read_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "a.csv").write_text("text;more\nred;x\n")
    card = '---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ";"\n---\n'
    (tmp_path / "words" / "README.md").write_text(card)
    assert [record for _, record in hub_read(tmp_path / "words")] == [{"text": "red", "more": "x"}]
