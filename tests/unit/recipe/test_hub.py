"""The Hugging Face hub: names of data sets with their splits."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")

from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.schema import Config, Data
from ftmon.trainer.recipe.data import records
from ftmon.trainer.recipe.data.records import Records


def rows(split: str, count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{split} {number}", "response": f"answer {number}"} for number in range(count)]


def write_repository(folder: Path) -> None:
    """Write a data set as a repository of the hub has it: parquet files of two configurations, named in its card."""
    import pyarrow
    from pyarrow import parquet

    card = ["---", "configs:"]
    for config in ("plain", "loud"):
        card += [f"- config_name: {config}", "  data_files:"]
        for split, count in (("train", 6), ("validation", 3)):
            path = folder / config / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = rows(f"{config} {split}", count)
            parquet.write_table(pyarrow.Table.from_pylist(content), path)
            card += [f"  - split: {split}", f"    path: {config}/{split}-*.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_repository(tmp_path / "words")
    return tmp_path / "words"


def read(name: Path, **data: Any) -> Records:
    return records.read(Config(data=Data(name=str(name), **data)))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("subset", ["plain", "loud"])
def test_a_data_set_is_read_by_its_name_its_configuration_and_split(repository: Path, subset: str, split: str) -> None:
    wanted = rows(f"{subset} {split}", 6 if split == "train" else 3)
    assert [record for _, record in read(repository, subset=subset, split=split)] == wanted


def test_a_share_of_a_split_is_read_in_the_syntax_of_datasets(repository: Path) -> None:
    found = read(repository, subset="plain", split="train[50%:]")
    assert [record for _, record in found] == rows("plain train", 6)[3:]
    assert found.digest != read(repository, subset="plain", split="train[:50%]").digest


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"subset": "plain", "split": "test"}, "data.name: {} cannot be read: .*test"),
        ({"subset": "quiet"}, "data.name: {} cannot be read: .*quiet"),
        ({}, "data.subset: {} has several, name one: plain, loud"),
    ],
)
def test_a_split_or_configuration_that_is_not_there_is_refused_with_those_that_are(
    repository: Path, data: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(repository, **data)
    text = str(refused.value)
    assert re.match(words.format(re.escape(str(repository))), text)
    assert "\n" not in text
