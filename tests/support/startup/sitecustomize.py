"""Makes the start of every process of the tests cheaper; their PYTHONPATH begins with this folder.

Imports are most of the suite's processor time: 2 to 3 s for each of 300 processes.

- Garbage collection is rare: otherwise it takes a third of the time of a rank that trains a few steps.
- transformers reads its 1,700 files twice at each start for a table of names (0.5 s): cached.
- ``dataclasses`` compiles the methods of 1,000 classes of torch and what comes with it (0.25 s): cached.
- PyTorch asks ``inspect`` where its operators are registered, which looks through all modules (0.15 s): not asked.
"""

import atexit
import contextlib
import dataclasses
import functools
import gc
import marshal
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

gc.set_threshold(200_000, 50, 1000)
atexit.register(gc.freeze)


class _FileCache:
    """A value that depends on the installation alone, cached in a file beside the bytecode.

    Args:
        name: what it is.
        of: what it depends on.
    """

    def __init__(self, name: str, of: object) -> None:
        self._file = Path(__file__).with_name("__pycache__") / f"{name}-{zlib.crc32(repr(of).encode()):08x}.marshal"

    def read(self) -> Any | None:
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
            return marshal.loads(self._file.read_bytes())
        return None

    def write(self, value: Any) -> None:
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(exist_ok=True)
            written = self._file.with_suffix(f".{os.getpid()}")
            written.write_bytes(marshal.dumps(value))
            written.replace(self._file)


class _CachedExec:
    """``exec`` for ``dataclasses``, which compiles the methods of each class from source: caches the code objects."""

    def __init__(self) -> None:
        self._cache = _FileCache("methods", (sys.version, sys.prefix))
        self._codes: dict[str, CodeType] = self._cache.read() or {}
        self._new = 0
        atexit.register(self._save)

    def __call__(self, source: str, namespace: dict[str, Any], local: dict[str, Any]) -> None:
        code = self._codes.get(source)
        if code is None:
            code = self._codes[source] = compile(source, "<string>", "exec")
            self._new += 1
        exec(code, namespace, local)

    def _save(self) -> None:
        if self._new > len(self._codes) // 10:
            self._cache.write(self._codes)


def _cache_import_structure(module: Any) -> None:
    create = module.create_import_structure_from_path

    def cached(path: str | Path) -> Any:
        folder = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
        if folder.name != "models" or folder.parent.name != "transformers":
            return create(path)
        cache = _FileCache("names", (str(folder), folder.stat().st_mtime_ns))
        found = cache.read()
        if found is None:
            found = create(path)
            cache.write(found)
        return found

    module.create_import_structure_from_path = functools.lru_cache(cached)


def _speed_up_get_source(module: Any) -> None:
    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    module.get_source = get_source


def _cache_dataclass_methods(_module: Any) -> None:
    if sys.version_info < (3, 13):  # later ones compile all methods of a class at once
        dataclasses.exec = _CachedExec()  # type: ignore[attr-defined]


class _PostImportHooks(MetaPathFinder):
    """Calls a function with each of some modules once it is imported."""

    def __init__(self, calls: dict[str, Callable[[Any], None]]) -> None:
        self._calls = calls

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        call = self._calls.pop(fullname, None)
        spec = PathFinder.find_spec(fullname, path, target) if call is not None else None
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            real = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                real(module)
                call(module)

            loader.exec_module = exec_module
        return spec


sys.meta_path.insert(
    0,
    _PostImportHooks(
        {
            "torch.version": _cache_dataclass_methods,
            "torch._library.utils": _speed_up_get_source,
            "transformers.utils.import_utils": _cache_import_structure,
        }
    ),
)
