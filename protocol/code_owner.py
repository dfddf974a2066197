"""Finds the owner of a source file: an installed package, Python, native code, or the user.

The owner is derived from the place of installation, never from one directory's name: users keep scripts in
``~/datasets`` and in checkouts of libraries. Snapshots from other machines also contain modules of a ``pip install
--target`` or of a checkout, which are recognised by the path of a module inside its package (``deepspeed/runtime/``).
"""

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import Distribution, distributions
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_INSTALLED = re.compile(r"(?:site|dist)-packages/([^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/")
_NATIVE = re.compile(r"(^|/)\?\?$|\.(so[.\d]*|cpp|cc|cu|c|h|hpp|cuh)$")
_MODULES = re.compile(
    r"/(?:"
    r"(torch)/(?:_\w+|amp|autograd|cuda|distributed|fx|nn|optim|utils)/"
    r"|(deepspeed)/(?:__init__\.py|accelerator|comm|launcher|module_inject|moe|ops|pipe|runtime|sequence|utils)"
    r"|(transformers)/(?:generation|integrations|models|modeling_\w+\.py|trainer\w*\.py|utils)"
    r"|(accelerate)/(?:accelerator\.py|optimizer\.py|utils)"
    r"|(peft)/(?:peft_model\.py|tuners|utils)"
    r"|(trl)/(?:models|trainer)/"
    r"|(?:(lightning)/(?:fabric|pytorch)|(pytorch_lightning)/(?:callbacks|core|loops|strategies|trainer))/"
    r")"
)
"""Modules that are recognised by their path in a package, wherever that is installed."""
_TYPED = ("<stdin>", "<ipython-input")
"""Code without a file that the user typed; other names in angle brackets are generated code."""
_HERE = os.path.dirname(os.path.dirname(os.path.realpath(__file__))).replace("\\", "/")
_FTMON = re.compile(rf"(?:{re.escape(_HERE)}|/ftmon)/(?:protocol|trainer|tui)/")
_PROBE = "/trainer/probe/"


class EditablePackage(NamedTuple):
    """A package that is installed from a checkout (``pip install -e``)."""

    directory: str  # directory of its modules, ending in a slash
    name: str


def owner_of(filename: str, editable: Iterable[EditablePackage] = ()) -> str:
    """Return the name of the package of a file, as in a traceback or a PyTorch snapshot; empty for the user's own code.

    ``editable`` has the packages that are installed from a checkout, without the user's own project.
    """
    filename = filename.replace("\\", "/")
    if found := _INSTALLED.search(filename):
        return found[1].removesuffix(".py")
    if _FTMON.search(filename):
        return "ftmon"
    if filename.startswith(_TYPED):
        return ""
    if filename.startswith("<") or _STANDARD.search(filename):
        return "python"
    if not filename or _NATIVE.search(filename):
        return "native"
    if found := _MODULES.search(filename):
        return next(name for name in found.groups() if name)
    return next((package.name for package in editable if filename.startswith(package.directory)), "")


@cache
def library_of(filename: str) -> str:
    """Return the name of the package a file belongs to in this environment; empty for the user's own code."""
    if os.path.dirname(filename) == sysconfig.get_path("scripts"):
        return "python"  # a console script that pip generated, such as torchrun
    return owner_of(filename, _editable_here())


def is_probe(filename: str) -> bool:
    """Return whether a file is part of ftmon's probe, whose wrappers are in every stack of a monitored rank."""
    return _PROBE in filename.replace("\\", "/") and owner_of(filename) == "ftmon"


@cache
def _editable_here() -> tuple[EditablePackage, ...]:
    """Return this environment's editable packages, without the project of this process's working directory."""
    try:
        here = os.getcwd()
    except OSError:
        here = ""
    return tuple(editable_packages(distributions(), here))


def editable_packages(installed: Iterable[Distribution], project: str) -> Iterator[EditablePackage]:
    """Yield the packages that are installed from a checkout other than that of ``project``.

    Source: PEP 610 (``direct_url.json``).
    """
    for distribution in installed:
        root = _checkout(distribution)
        if not root or (project + "/").startswith(root + "/"):
            continue
        name = distribution.metadata["Name"] or os.path.basename(root)
        modules = (distribution.read_text("top_level.txt") or name.replace("-", "_")).split()
        folders = [(f"{root}/{source}{module}/", module) for module in modules for source in ("", "src/")]
        found = [EditablePackage(*each) for each in folders if os.path.isdir(each[0])]
        yield from found or [EditablePackage(root + "/", name)]


def _checkout(distribution: Distribution) -> str:
    try:
        told = json.loads(distribution.read_text("direct_url.json") or "{}")
        if not told.get("dir_info", {}).get("editable"):
            return ""
        return unquote(urlsplit(told["url"]).path).rstrip("/")
    except (OSError, ValueError, KeyError, AttributeError):
        return ""  # a damaged installation: its files count as the user's own
