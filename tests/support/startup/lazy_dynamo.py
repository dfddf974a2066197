"""``torch._dynamo`` that is imported when it is used (``sitecustomize``), for processes in which it is disabled.

PyTorch, DeepSpeed and transformers call a few of its functions only to mark code for it; transformers imports one of
its modules. A process group empties its caches, and DistributedDataParallel asks for its mode. These are here;
everything else, as compiling, imports the real package.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"
_ALONE = (f"{_NAME}.config", f"{_NAME}._trace_wrapped_higher_order_op")  # modules that need no other of the package


class _Package(ModuleType):
    """The package before its ``__init__.py`` has run."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in _PARTS:
            return _PARTS[name]
        load()
        return getattr(self, name)


class _Part(ModuleType):
    """One of its modules with the functions that need nothing of the package."""

    def __getattr__(self, name: str) -> Any:
        load()
        return getattr(sys.modules[self.__name__], name)


def _optimize_ddp_mode() -> str:
    mode = importlib.import_module(f"{_NAME}.config").optimize_ddp
    return mode if isinstance(mode, str) else "ddp_optimizer" if mode else "no_optimization"


_PARTS = {name: _Part(f"{_NAME}.{name}") for name in ("trace_rules", "utils")}
vars(_PARTS["trace_rules"])["clear_lru_cache"] = lambda: None
vars(_PARTS["utils"])["get_optimize_ddp_mode"] = _optimize_ddp_mode


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **_: Any) -> Callable[..., Any]:
    return fn if fn is not None else _disable


def _mark_constant(fn: Any) -> Any:
    fn._dynamo_marked_constant = True
    return fn


_for_later: list[tuple[str, Any]] = []


def _later(name: str, fn: Any) -> Any:
    _for_later.append((name, fn))
    return fn


class _Lazily:
    def __init__(self, real: Any) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.graph_break = lambda msg="": None  # type: ignore[attr-defined]
        module.disable = _disable  # type: ignore[attr-defined]
        module.assume_constant_result = _mark_constant  # type: ignore[attr-defined]
        for name in ("allow_in_graph", "disallow_in_graph"):
            setattr(module, name, functools.partial(_later, name))


class _There:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def load() -> None:
    """Run the package's ``__init__.py``, if it has not run."""
    package = sys.modules[_NAME]
    if isinstance(package, _Package):
        package.__class__ = ModuleType
        loader: Any = package.__spec__.loader  # type: ignore[union-attr]
        package.__spec__.loader = package.__loader__ = loader.real  # type: ignore[union-attr]
        loader.real.exec_module(package)
        for name, fn in _for_later:
            getattr(package, name)(fn)


def find_spec(name: str, path: Any) -> ModuleSpec | None:
    if name != _NAME:
        if name not in _ALONE:
            load()
        if name in sys.modules:
            return ModuleSpec(name, _There())  # type: ignore[arg-type]
        return None
    spec = PathFinder.find_spec(name, path)
    if spec is not None:
        spec.loader = _Lazily(spec.loader)  # type: ignore[assignment]
    return spec
