"""Configuration files that nobody honest writes: one line each, soon, whatever is in them."""

import time
from pathlib import Path

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe.config.load import load

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE = {
    "30 MB in a value": (f"model:\n  name: {'x' * 30_000_000}\n", "is larger than 128 KiB"),
    "100 kB in a value": (f"model:\n  name: {'x' * 100_000}\n", "model.name must be text of at most 4,096 characters"),
    "100 kB in a number": (f"zero:\n  stage: {'9' * 100_000}\n", "zero.stage must be 0, 1, 2 or 3, not 999"),
    "100 kB in a key": (f"zero:\n  {'k' * 1000}: 1\n", "unknown key zero.kkk"),
    "a newline in a key": ('"zero\\nforged: everything is well": 1\n', "unknown key zero�forged"),
    "an escape in a key": ('"\\e[31mzero": 1\n', "unknown key zero"),
    "an escape in a value": ('zero:\n  stage: "\\e[2J\\x9b2J\\u202e"\n', "must be 0, 1, 2 or 3"),
    "a NUL in a value": ('model:\n  name: "a\\0b"\n', "without a NUL"),
    "a NUL": ("model:\n  name: a\0b\n", "not valid YAML"),
    "nesting": ("model:\n  config: " + "[" * 20_000, "is nested too deeply: no setting has"),
    "nesting that is whole": ("model:\n  config: {a: " + "[" * 40 + "]" * 40 + "}\n", "is nested too deeply"),
    "aliases": (BOMB, "more than 10,000 keys and values"),
    "aliases in a free value": (
        f"model:\n  config:\n    {BOMB.replace(chr(10), chr(10) + '    ')}",
        "more than 10,000",
    ),
    "an alias to itself": ("model: &a\n  config: *a\n", "is nested too deeply"),
    "a key twice": ("zero:\n  stage: 1\n  stage: 2\n", "stage is given twice"),
    "a code": ("model: !!python/object/apply:os.system ['true']\n", "must be a section"),
    "many values": ("data: [" + "a," * 50_000 + "]\n", "more than 10,000 keys and values"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line_that_says_why(tmp_path: Path, name: str) -> None:
    text, words = HOSTILE[name]
    path = tmp_path / "train.yaml"
    path.write_text(text, newline="")
    begun = time.thread_time()
    with pytest.raises(ConfigError) as refused:
        load(str(path))
    said = str(refused.value)
    assert time.thread_time() - begun < 20
    assert words in said
    assert said.startswith(str(path))
    assert said.isprintable()
    assert len(said) < 1000


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_bytes(b"model:\n  name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="is not a text file in UTF-8"):
        load(str(path))
    with pytest.raises(ConfigError, match="is larger than 128 KiB"):
        load("/dev/zero")
