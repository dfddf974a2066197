"""The demo's own configuration and data."""

import json

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.recipe import hardware, start
from ftmon.trainer.recipe.preflight import resolve


def test_the_data_set_is_small_distinct_and_whole() -> None:
    records = [json.loads(line) for line in start.DATA.read_text().splitlines()]
    assert 400 <= len(records) <= 800
    assert len({record["prompt"] for record in records}) == len(records)
    assert all(set(record) == {"prompt", "response"} and all(record.values()) for record in records)


@pytest.mark.parametrize("gpus", [[], ["0"], ["0", "1", "2", "3"]])
def test_it_takes_all_gpus_or_two_cpu_ranks(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(start, "usable_gpus", lambda: gpus)
    resolved = resolve.resolve(start.demo_config([]))
    assert resolved.ranks == (len(gpus) or 2)
    assert resolved.gpus == gpus
    assert resolved.config.zero.stage == 2


def test_an_override_of_the_demo_is_checked_like_any_other() -> None:
    with pytest.raises(ConfigError, match=r"^command line: zero\.stage must be"):
        start.demo_config(["zero.stage=4"])
