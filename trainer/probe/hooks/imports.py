"""Runs actions right after a module was imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ..guard import logged

_actions: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action(module)`` once module ``name`` has been imported: now, if it has been already.

    An exception of ``action`` is logged, never raised into the importing script.
    """
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _act(action, module)
        return
    _actions[name] = action
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _act(action: Callable[[ModuleType], None], module: ModuleType) -> None:
    with logged(f"after import of {module.__name__}"):
        action(module)


class _Finder:
    """Meta path finder that lets the other finders find an awaited module, and wraps its loader."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        action = _actions.get(name)
        if action is None:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                _tap(name, spec, action)
                return spec
        return None


def _tap(name: str, spec: ModuleSpec, action: Callable[[ModuleType], None]) -> None:
    loader: Any = spec.loader
    original = getattr(loader, "exec_module", None)
    if original is None:
        return

    def exec_module(module: ModuleType) -> None:
        # The loader keeps its type, so that resource and source lookups still work; the wrapper is used once.
        del loader.exec_module
        original(module)
        if _actions.pop(name, None) is not None:
            _act(action, sys.modules.get(name, module))

    try:
        loader.exec_module = exec_module
    except AttributeError:
        return
