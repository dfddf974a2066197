"""Put on the path of every process that the tests start: what each would do alike at its start costs less.

The garbage collector rarely looks for garbage in imports: otherwise a third of the processor time of a rank that takes
a few steps is spent on it, at imports and at the end. And the table of names that transformers makes of its 1,700 files
at each start, twice, is kept: 0.5 s of processor time.
"""

import atexit
import contextlib
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
from types import ModuleType
from typing import Any

gc.set_threshold(200_000, 50, 1000)
atexit.register(gc.freeze)


class _KeptNames(MetaPathFinder):
    """Replaces the function of transformers that makes the table, once its module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "transformers.utils.import_utils":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._exec, loader.exec_module)
        return spec

    @staticmethod
    def _exec(real: Callable[[ModuleType], None], module: Any) -> None:
        real(module)
        create = module.create_import_structure_from_path
        module.create_import_structure_from_path = functools.lru_cache(functools.partial(_kept, create))


def _kept(create: Callable[[str | Path], Any], path: str | Path) -> Any:
    folder = Path(path).parent if Path(path).name == "__init__.py" else Path(path)
    if folder.name != "models" or folder.parent.name != "transformers":
        return create(path)
    installed = f"{folder} {folder.stat().st_mtime_ns}".encode()
    file = Path(__file__).with_name("__pycache__") / f"names-{zlib.crc32(installed):08x}.marshal"
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError):
        return marshal.loads(file.read_bytes())
    made = create(path)
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_bytes(marshal.dumps(made))
        written.replace(file)
    return made


sys.meta_path.insert(0, _KeptNames())
