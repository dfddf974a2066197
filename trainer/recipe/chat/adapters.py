"""Several sets of adapters (peft) on one model, of which one answers at a time."""

import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ....protocol.errors import UsageError

BASE = "base"  # Name of the model without adapters
_GAP = "  |  "
_NARROWEST = 20  # Characters of a column; narrower ones are written one below the other


def parse(given: Sequence[str]) -> dict[str, str]:
    """Return the paths of ``NAME=PATH`` words by name; a wrong word is a ``UsageError``."""
    found: dict[str, str] = {}
    for word in given:
        name, equals, path = word.partition("=")
        if not equals or not path or not name.replace("-", "_").isidentifier():
            raise UsageError(f"--adapter {word}: must be NAME=PATH, such as poems=out/model, with a name of one word")
        if name == BASE or name in found:
            why = "is the name of the model without adapters" if name == BASE else "is given twice"
            raise UsageError(f"--adapter {word}: {name} {why}; use another name")
        found[name] = path
    return found


class Place(NamedTuple):
    """Where a set of adapters is."""

    folder: Path  # It has ``adapter_config.json`` and, if it has its own, the tokenizer
    weights: Callable[[], dict[str, Any]] | None
    """Reads the weights of a checkpoint of ftmon's trainer; None: they are in the folder, as peft saves them."""


def load(model: Any, tokenizer: Any, places: Mapping[str, Place]) -> tuple[Any, dict[str, Any]]:
    """Return a model with all adapters, and the tokenizer of each name: its folder's own, which has its chat template.

    What cannot be loaded, or does not fit the model, is a ``UsageError``.
    """
    from transformers import AutoTokenizer

    device, tokenizers = model.device, dict[str, Any]()
    for name, place in places.items():
        if not (place.folder / "adapter_config.json").is_file():
            raise UsageError(f"--adapter {name}: {place.folder} holds no adapters (no adapter_config.json)")
        try:
            model = _add(model, name, place)
            has_own = (place.folder / "tokenizer_config.json").is_file()
            tokenizers[name] = AutoTokenizer.from_pretrained(str(place.folder)) if has_own else tokenizer
        except Exception as error:  # peft's, the files' and the shapes' own errors
            lines = (str(error).strip() or repr(error)).splitlines()
            detail = next((line.strip() for line in lines if "size mismatch" in line), lines[0])
            raise UsageError(f"--adapter {name}: {place.folder} cannot be loaded on this model: {detail}") from None
    return model.to(device).eval(), tokenizers


def _add(model: Any, name: str, place: Place) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict

    folder, added = str(place.folder), isinstance(model, PeftModel)
    if place.weights is None:
        if not added:
            return PeftModel.from_pretrained(model, folder, adapter_name=name)
        model.load_adapter(folder, adapter_name=name)
        return model
    config: Any = LoraConfig.from_pretrained(folder)
    if added:
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    plain = {key.replace(".default.", ".").removesuffix(".default"): one for key, one in place.weights().items()}
    set_peft_model_state_dict(model, plain, adapter_name=name)
    return model


def select(model: Any, name: str) -> None:
    """Let the adapters of this name answer, or with ``BASE`` the model without any."""
    if name == BASE:
        model.base_model.disable_adapter_layers()
    else:
        model.base_model.enable_adapter_layers()
        model.set_adapter(name)


def side_by_side(answers: Mapping[str, str], width: int | None = None) -> str:
    """Return answers in columns with their names above them, or one below the other where they would be too narrow."""
    whole = width or shutil.get_terminal_size((100, 24)).columns
    column = (whole - len(_GAP) * (len(answers) - 1)) // max(1, len(answers))
    if column < _NARROWEST:
        return "\n\n".join(f"{name}:\n{answer}" for name, answer in answers.items())
    wrapped = [
        [name, "-" * column, *(part for line in answer.splitlines() for part in (textwrap.wrap(line, column) or [""]))]
        for name, answer in answers.items()
    ]
    rows = max(map(len, wrapped))
    lines = ([lines[row] if row < len(lines) else "" for lines in wrapped] for row in range(rows))
    return "\n".join(_GAP.join(part.ljust(column) for part in parts).rstrip() for parts in lines)
