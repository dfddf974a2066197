"""How a run ended, as an exit status and as the last lines a person reads about it."""

from ...protocol.rundir import ExitFile, RunDir

INTERRUPTED = 130
_LOG_LINES = 12
_LOG_TAIL_BYTES = 16_384


def exit_status(end: ExitFile) -> int:
    """Map how the job ended to a command's exit status: 0 done, 1 failed, 130 ended by somebody's wish."""
    if end.exit_code == 0:
        return 0
    return INTERRUPTED if end.state == "stopped" else 1


def last_words(run: RunDir, limit: int = _LOG_LINES) -> list[str]:
    """Return the last lines of the launcher's log: what the job itself said before it failed."""
    try:
        with (run.logs / "launcher.log").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()][-limit:]
