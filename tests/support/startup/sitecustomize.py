"""Put on the path of every process that the tests start: what each would do alike at its start costs less.

The garbage collector rarely looks for garbage in imports: otherwise a third of the processor time of a rank that takes
a few steps is spent on it, at imports and at the end. Kept from one process to the next are the table of names that
transformers makes of its 1,700 files, twice at each start (0.5 s of processor time), and the compiled methods of the
dataclasses of everything that comes with torch (0.25 s). PyTorch asks ``inspect`` where each of its operators is
registered, which looks through all modules (0.15 s).
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


class _Kept:
    """A value of an installation, kept in a file beside the bytecode.

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


class _Methods:
    """In place of ``exec`` in ``dataclasses``, which compiles the methods of each class from their source."""

    def __init__(self) -> None:
        self._kept = _Kept("methods", (sys.version, sys.prefix))
        self._codes: dict[str, CodeType] = self._kept.read() or {}
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
            self._kept.write(self._codes)


def _keep_names(module: Any) -> None:
    create = module.create_import_structure_from_path

    def kept(path: str | Path) -> Any:
        folder = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
        if folder.name != "models" or folder.parent.name != "transformers":
            return create(path)
        kept = _Kept("names", (str(folder), folder.stat().st_mtime_ns))
        found = kept.read()
        if found is None:
            found = create(path)
            kept.write(found)
        return found

    module.create_import_structure_from_path = functools.lru_cache(kept)


def _name_callers(module: Any) -> None:
    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    module.get_source = get_source


def _keep_methods(_module: Any) -> None:
    if sys.version_info < (3, 13):  # later ones compile all methods of a class at once
        dataclasses.exec = _Methods()  # type: ignore[attr-defined]


class _After(MetaPathFinder):
    """Calls functions with modules once these are executed."""

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
    _After(
        {
            "torch.version": _keep_methods,
            "torch._library.utils": _name_callers,
            "transformers.utils.import_utils": _keep_names,
        }
    ),
)
