"""The model card: what it names of the data."""

from pathlib import Path

from ftmon.trainer.recipe.config.schema import Config, Data, File
from ftmon.trainer.recipe.export import export
from ftmon.trainer.recipe.state import TrainState


def text(data: Data) -> str:
    return export.text(Config(data=data), export.Results(TrainState(), "llama", 10, 10))


def test_files_are_named_with_their_weight_and_data_sets_of_the_hub_for_the_hub(tmp_path: Path) -> None:
    files = [File("a.jsonl", 2.0), File("b.jsonl", 0.5)]
    assert "| data | a.jsonl (weight 2), b.jsonl (weight 0.5): 0 examples" in text(Data(files=files))
    assert "datasets:\n- me/poems\n" in text(Data(name="me/poems"))
    assert "datasets:" not in text(Data(name=str(tmp_path)))
