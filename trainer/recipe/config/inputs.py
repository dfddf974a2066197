"""Checks the model and the data files that a configuration names."""

from pathlib import Path
from typing import Any

from ....protocol.errors import UsageError
from ..data import formats
from ..data.first import first_record
from ..data.shipped import NONE, shipped
from .load import Loaded

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


def check_model(loaded: Loaded) -> None:
    """Refuse a model or tokenizer that is not given, given twice, or missing.

    Raises:
        ConfigError: it is refused; the text names the place and the dotted path.
    """
    model = loaded.config.model
    if not model.name and not model.config:
        raise loaded.error("model", "needs a name (a hub name or a local folder) or a config (random weights)")
    if model.name and model.config:
        raise loaded.error("model", "has both a name and a config; leave one out")
    if model.config and not isinstance(model.config.get("model_type"), str):
        raise loaded.error("model.config", "needs a model_type, such as llama or qwen2")
    for path, name, marker in (
        ("model.name", model.name, "config.json"),
        ("tokenizer.name", loaded.config.tokenizer.name, "tokenizer_config.json"),
    ):
        if not is_path(name):
            continue
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise loaded.error(path, f"{name}: no such folder")
        if not (folder / marker).exists():
            raise loaded.error(path, f"{name}: is not a folder that save_pretrained wrote (no {marker})")


def check_data(loaded: Loaded) -> None:
    """Refuse data that is not given, given twice, or missing, and files that cannot be read.

    Raises:
        ConfigError: it is refused; the text names the place and the dotted path.
    """
    data = loaded.config.data
    given = [key for key in ("path", "files", "name") if getattr(data, key)]
    if not given:
        raise loaded.error("data", "needs a path (a local file), files (several) or a name (of a data set on the hub)")
    if len(given) > 1:
        raise loaded.error(
            "data", f"has both a {given[0]} and {'' if given[1] == 'files' else 'a '}{given[1]}; leave one out"
        )
    # A folder may be a data set in the hub's form: files of several splits, named in a card.
    if is_path(data.name) and not (folder := Path(data.name).expanduser()).is_dir():
        what = "is a file; give it as data.path" if folder.exists() else "no such folder; give a file as data.path"
        raise loaded.error("data.name", f"{data.name}: {what}")
    if data.train_on_prompt and data.train_on != "assistant":
        raise loaded.error("data.train_on_prompt", f"and data.train_on={data.train_on} differ; leave the former out")
    template = Path(data.chat_template).expanduser()
    if data.chat_template and data.chat_template not in (NONE, *shipped()) and not template.is_file():
        raise loaded.error(
            "data.chat_template", f"{data.chat_template}: no such file; give {', '.join(shipped())}, none or a path"
        )
    if data.path:
        check_file(loaded, "data.path", data.path)
    for number, file in enumerate(data.files):
        check_file(loaded, f"data.files[{number}].path", file.path)


def check_file(loaded: Loaded, key: str, name: str) -> None:
    """Refuse a data file that cannot be read, or whose first record lacks what ``data.format`` needs.

    Raises:
        ConfigError: it is refused; the text names the place and the dotted path.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise loaded.error(key, f"{name}: " + ("is a directory" if path.is_dir() else "no such file"))
    if path.suffix not in _DATA_SUFFIXES:
        raise loaded.error(key, f"{name}: must end in {', '.join(_DATA_SUFFIXES[:-1])} or .parquet")
    if path.stat().st_size == 0:
        raise loaded.error(key, f"{name}: is empty")
    if path.suffix == ".parquet":
        return
    try:
        record = first_record(path, loaded.config.data.text_column)
    except OSError as error:
        raise loaded.error(key, f"{name}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise loaded.error(key, f"{name}: {error}") from None
    _check_columns(loaded, record)


def _check_columns(loaded: Loaded, record: dict[str, Any]) -> None:
    """Refuse data whose first record lacks what ``data.format`` needs.

    Raises:
        ConfigError: a column is missing.
    """
    try:
        formats.detect(record, loaded.config.data)
    except UsageError as error:
        path, _, text = str(error).partition(" ")
        raise loaded.error(path, text) from None


def is_path(name: str) -> bool:
    """Return whether a name is a local path, not a hub name such as ``Qwen/Qwen2.5-0.5B``."""
    if not name:
        return False
    return name.startswith(("/", "./", "../", "~")) or Path(name).is_dir() or name.count("/") > 1
