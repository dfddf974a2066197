"""The process that unpickles: ``python -m ftmon.protocol.snapshot.child FILE`` writes a snapshot's columns to stdout.

Restricting the names in a pickle does not bound its cost: one opcode can allocate gigabytes, and a tuple nested a
million times overflows the C stack when it is hashed. Here either ends only this process, whose end also returns the
memory of a million dictionaries to the system.
"""

import contextlib
import gc
import os
import sys
from pathlib import Path

import msgspec

from .columns import Compactor
from .errors import SnapshotError
from .unpickle import granted_memory, read_pickle

REFUSED = 3
_SPARE = 2**29
_MOST_MEMORY = 64 * 2**30


def main() -> int:
    """Read a snapshot and write its columns; a refusal is one line on stderr and status ``REFUSED``."""
    path = Path(sys.argv[1])
    # Nothing here is cyclic, and a collection over a million dictionaries takes as long as reading them.
    gc.disable()
    try:
        _limit_memory(path)
        made = Compactor(str(path))
        _write(made.snapshot(read_pickle(path)))
        # The reader processes the first part meanwhile.
        _write(made.stack_columns())
    except (SnapshotError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (MemoryError, RecursionError):
        print(f"{path}: refused: it asks for far more memory than its size justifies", file=sys.stderr)
        return REFUSED
    # A normal exit would first free a million dictionaries.
    os._exit(0)


def _write(part: msgspec.Struct) -> None:
    """Write one part: its length in eight bytes, then msgpack."""
    data = msgspec.msgpack.encode(part)
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(len(data).to_bytes(8, "little"))
        out.write(data)


def _limit_memory(path: Path) -> None:
    """Limit this process's memory by the file's size; without ``resource`` only the check of the cost applies."""
    try:
        import resource
    except ImportError:
        return
    # The estimate of the objects is an upper bound, but the columns and the interpreter add to it.
    most = min(_MOST_MEMORY, granted_memory(path) * 3 // 2 + _SPARE)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
