"""The model card: what it names of the data."""

from pathlib import Path

from ftmon.trainer.recipe.config.schema import Config, Data, File
from ftmon.trainer.recipe.export import export
from ftmon.trainer.recipe.state import TrainState


def text(data: Data) -> str:
    return export.text(Config(data=data), export.Results(TrainState(), "llama", 10, 10))


def test_every_file_is_named_with_its_weight() -> None:
    files = [File("a.jsonl", 2.0), File("b.jsonl", 0.5)]
    assert "| data | a.jsonl (weight 2), b.jsonl (weight 0.5): 0 examples" in text(Data(files=files))


def test_a_data_set_of_the_hub_is_named_for_the_hub_and_a_folder_is_not(tmp_path: Path) -> None:
    assert "datasets:\n- me/poems\n" in text(Data(name="me/poems"))
    assert "datasets:" not in text(Data(name=str(tmp_path)))
