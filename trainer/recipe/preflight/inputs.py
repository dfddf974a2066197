"""Checks the model and the data that a configuration names: files, and names on the Hugging Face Hub.

A refusal is a ``ConfigError`` whose text names the place and the dotted path.
"""

import os
import socket
import threading
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from ....protocol.errors import UsageError
from ..config.load import Loaded
from ..data import formats
from ..data.first import first_record
from ..data.shipped import NONE, shipped

_DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


def check_model(loaded: Loaded) -> None:
    """Refuse a model or tokenizer that is not given, given twice, or missing."""
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
    """Refuse data that is not given, given twice, or missing, and files that cannot be read."""
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
    """Refuse a data file that cannot be read, or whose first record lacks what ``data.format`` needs."""
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
    """Refuse data whose first record lacks what ``data.format`` needs."""
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


_HUB = "https://huggingface.co"
_CONNECT_SECONDS = 8.0
_TRUE = ("1", "TRUE", "YES", "ON")


def check_hub(loaded: Loaded, *, data: bool = True) -> None:
    """Refuse names on the Hugging Face Hub that cannot be resolved, within seconds."""
    config = loaded.config
    for path, name, kind in (
        ("model.name", config.model.name, "models"),
        ("tokenizer.name", config.tokenizer.name, "models"),
        ("data.name", config.data.name if data else "", "datasets"),
    ):
        if name and not is_path(name) and (refusal := hub_refusal(name, kind)):
            raise loaded.error(path, refusal)


def hub_refusal(name: str, kind: str = "models") -> str:
    """Return why a name on the Hugging Face Hub cannot be resolved here; empty if it can.

    Without a connection the libraries repeat every request for half a minute or longer. If the cache has a copy,
    ``HF_HUB_OFFLINE`` is set, with which they use it at once, in this process and those that it starts.

    ``kind`` is ``models`` or ``datasets``.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        return ""
    endpoint = os.environ.get("HF_ENDPOINT") or _HUB
    problem = _connection_problem(endpoint)
    if not problem:
        return ""
    if _is_cached(name, kind):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return ""
    return (
        f"{name}: cannot reach {urlsplit(endpoint).hostname or endpoint} ({problem}), and the cache has no copy; give "
        "a local folder, or check the network and HTTPS_PROXY"
    )


@cache
def _connection_problem(endpoint: str) -> str:
    """Return why no connection to an endpoint, or to the proxy before it, is possible; empty if one is."""
    url = urlsplit(endpoint)
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    problems = ["no answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
            problems[0] = ""
        except OSError as error:
            problems[0] = error.strerror or str(error)

    # A thread: the resolution of the name has no time limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    return problems[0]


def _is_cached(name: str, kind: str) -> bool:
    """Return whether the cache of the hub's libraries has files of a model or a data set."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(os.environ.get("HF_HOME") or Path(base, "huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    folders = [hub / f"{kind}--{name.replace('/', '--')}" / "snapshots"]
    folders += [prepared / name.replace("/", "___")] if kind == "datasets" else []
    return any(folder.is_dir() and any(folder.iterdir()) for folder in folders)
