"""The last lines of a job's log file, and the lines that ftmon itself writes to ``launcher.log``."""

from pathlib import Path

_OWN = "ftmon: "
_TAIL_BYTES = 32_768


def print_own(text: str) -> None:
    """Print a line of ftmon's own to the output of the job."""
    print(f"{_OWN}{text}", flush=True)


def last_lines(log: Path, limit: int, *, own: bool = False) -> list[str]:
    """Return the last lines that are not blank, at most ``limit``; none if the file cannot be read.

    Args:
        log: the file, of which the last 32 KiB are read.
        limit: maximum number of lines.
        own: include ftmon's own lines.
    """
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip() and (own or not line.startswith(_OWN))][-limit:]
