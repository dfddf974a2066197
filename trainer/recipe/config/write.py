"""Writes the configuration as YAML: a commented default for users, and a plain dump for the run directory."""

import ast
import inspect as source
import json
import re
import textwrap
from typing import Any

import msgspec

from . import schema
from .schema import Config

_WIDTH = 110
_UNPRINTABLE = re.compile(
    "[^\\x20-\\x7e\\xa0-\\u2027\\u202a-\\ud7ff\\ue000-\\ufefe\\uff00-\\ufffd\\U00010000-\\U0010ffff]"
)
"""Characters that YAML does not allow, or reads as the end of a line."""
_HEADER = """\
# ftmon's trainer. Start it: ftmon train train.yaml [key.sub=value ...]
# Every key may be left out; the values shown are the defaults. model and data need one key each.
"""


def commented_default() -> str:
    """Return the default configuration with each field's docstring above it; it loads back to the defaults."""
    lines = [_HEADER]
    docs = field_docs()
    default = Config()
    for section in msgspec.structs.fields(Config):
        kind = type(getattr(default, section.name))
        if kind is dict:
            lines.extend(_comment(docs["Config", section.name], ""))
            lines.append(f"{section.name}: {{}}")
            continue
        lines.extend(_comment(" ".join((kind.__doc__ or "").split()), ""))
        lines.append(f"{section.name}:")
        for found in msgspec.structs.fields(kind):
            lines.extend(_comment(docs[kind.__name__, found.name], "  "))
            lines.append(f"  {found.name}: {_inline(getattr(getattr(default, section.name), found.name))}")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def dump(config: Config) -> str:
    """Return a configuration as YAML that loads back to the same, defaults included."""
    lines: list[str] = []
    for section in msgspec.structs.fields(Config):
        value = getattr(config, section.name)
        if isinstance(value, dict):
            lines.append(f"{section.name}: {_inline(value)}")
            continue
        lines.append(f"{section.name}:")
        lines.extend(
            f"  {found.name}: {_inline(getattr(value, found.name))}" for found in msgspec.structs.fields(type(value))
        )
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """Return one value in YAML's flow style, which includes JSON (without its surrogate pairs)."""
    if isinstance(value, float):
        return repr(value)
    return _UNPRINTABLE.sub(
        lambda found: f"\\U{ord(found.group()):08x}", json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    )


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def field_docs() -> dict[tuple[str, str], str]:
    """Return the docstring behind each field, read from the source: Python does not keep them elsewhere."""
    docs: dict[tuple[str, str], str] = {}
    for node in ast.parse(source.getsource(schema)).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for pair in zip(node.body, node.body[1:], strict=False):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[node.name, name] = " ".join(text.split())
                case _:
                    pass
    return docs
