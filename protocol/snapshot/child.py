"""The process that unpickles: ``python -m ftmon.protocol.snapshot.child FILE`` writes a snapshot's columns to stdout.

Restricting what a pickle may name does not bound what it may cost: one opcode can ask for gigabytes, and a tuple nested
a million times overflows the C stack when it is hashed. Here either ends this process alone. It also gives the memory
of the million dictionaries back to the system.
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
    """Read, compact, write; a refusal is one line on stderr and status ``REFUSED``."""
    path = Path(sys.argv[1])
    # Nothing here is in a cycle, and walking a million dictionaries takes as long as reading them.
    gc.disable()
    try:
        _limit_memory(path)
        made = Compactor(str(path))
        _write(made.snapshot(read_pickle(path)))
        # The reader works on the first part meanwhile.
        _write(made.stack_columns())
    except (SnapshotError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (MemoryError, RecursionError):
        print(f"{path}: refused: it asks for far more memory than its size justifies", file=sys.stderr)
        return REFUSED
    # The interpreter would first take a million dictionaries apart.
    os._exit(0)


def _write(part: msgspec.Struct) -> None:
    """Write one part: its length in eight bytes, then msgpack."""
    data = msgspec.msgpack.encode(part)
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(len(data).to_bytes(8, "little"))
        out.write(data)


def _limit_memory(path: Path) -> None:
    """Let a small file use little; where the system has no such limit, the size of the file is the only one."""
    try:
        import resource
    except ImportError:
        return
    # The estimate of the cost is from above and this from below: the columns and the interpreter come on top.
    most = min(_MOST_MEMORY, granted_memory(path) * 3 // 2 + _SPARE)
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard == resource.RLIM_INFINITY or hard > most:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    sys.exit(main())
