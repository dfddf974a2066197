"""What is written as YAML loads back to the same configuration."""

from typing import Any

import msgspec
from ftmon.protocol.run.targets import REPORT_TARGETS
from ftmon.trainer.recipe.config import write
from ftmon.trainer.recipe.config.load import decode, parse
from ftmon.trainer.recipe.config.schema import Config
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(-1e9, 1e9) | TEXT
FREE = st.dictionaries(
    st.text("abcdefgh_", min_size=1, max_size=6),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=3,
)


def values(info: inspect.Type) -> "st.SearchStrategy[Any]":
    match info:
        case inspect.Metadata(type=inner):
            return values(inner)
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{found.name: values(found.type) for found in fields})
        case inspect.LiteralType(values=allowed):
            return st.sampled_from(allowed)
        case inspect.UnionType(types=types):
            return st.one_of(map(values, types))
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=low, le=high):
            return st.integers(int(low or 0), int(10**9 if high is None else high))
        case inspect.FloatType(gt=above, ge=low, lt=below, le=high):
            low, high = above if low is None else low, below if high is None else high
            limits = {"exclude_min": above is not None, "exclude_max": below is not None}
            return st.floats(low, high, **limits, allow_infinity=False, allow_nan=False)
        case inspect.StrType():
            return TEXT
        case inspect.ListType(item_type=item):
            return st.lists(values(item), max_size=3)
        case inspect.DictType():
            return FREE
        case _:
            raise AssertionError(info)


CONFIGS = values(inspect.type_info(Config))


def read(text: str) -> Config:
    return decode(parse(text, "train.yaml"), "train.yaml").config


@settings(deadline=None, max_examples=40)
@given(CONFIGS)
def test_a_dump_loads_back_to_the_same(config: Config) -> None:
    assert read(write.dump(config)) == config


def test_the_commented_default_loads_back_to_the_defaults_and_shows_every_fields_docstring() -> None:
    assert read(write.commented_default()) == Config()
    text = " ".join(write.commented_default().replace("#", " ").split())
    docs = write.field_docs()
    assert docs["Config", "deepspeed"] in text
    for section in (one for one in msgspec.structs.fields(Config) if one.name != "deepspeed"):
        for found in msgspec.structs.fields(section.type):
            assert docs[section.type.__name__, found.name] in text, f"{section.name}.{found.name}"
    assert [name for name in REPORT_TARGETS if name not in docs["Monitor", "report_to"]] == []
