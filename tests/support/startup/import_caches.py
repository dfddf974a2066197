"""What makes importing torch and transformers cheaper (``sitecustomize``)."""

import atexit
import contextlib
import dataclasses
import functools
import inspect
import marshal
import os
import sys
import zlib
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any


class _FileCache:
    """A value that depends on the installation alone, as ``of`` says, cached in a file beside the bytecode."""

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


def cache_import_structure(module: Any) -> None:
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


def speed_up_get_source(module: Any) -> None:
    def get_source(stacklevel: int) -> str:
        frame = sys._getframe(stacklevel)
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    module.get_source = get_source


class _Inspect:
    """``inspect`` with the module of a frame by the frame's own word."""

    def getmodule(self, frame: FrameType) -> ModuleType | None:
        return sys.modules.get(frame.f_globals.get("__name__", ""))

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)


def speed_up_getmodule(module: Any) -> None:
    module.inspect = _Inspect()


def compile_nothing_where_disabled(_module: Any) -> None:
    torch: Any = sys.modules["torch"]
    real = torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        if os.environ.get("TORCHDYNAMO_DISABLE") != "1":
            return real(model, **options)
        return model if model is not None else functools.partial(compile_, **options)

    torch.compile = compile_


def cache_dataclass_methods(_module: Any) -> None:
    if sys.version_info < (3, 13):  # later ones compile all methods of a class at once
        dataclasses.exec = _CachedExec()  # type: ignore[attr-defined]
