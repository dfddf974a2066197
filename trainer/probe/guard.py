"""Never harming the host: where the probe writes what went wrong inside itself. Standard library only."""

import os
import time
import traceback


def log(text: str) -> None:
    """Append one line to the run's ``logs/probe.log``; without a run, or when that fails, the line is lost."""
    run = os.environ.get("FTMON_PLACE") or os.environ.get("FTMON_RUN")  # place.folder(), which may be what failed
    if not run:
        return
    try:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        with open(os.path.join(run, "logs", "probe.log"), "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{stamp} pid {os.getpid()} rank {os.environ.get('RANK', '-')}: {text}\n")
    except Exception:
        return


def log_error(what: str, error: BaseException) -> None:
    """Append one line about an exception: what failed, the error, and the innermost places it came from."""
    places = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
    log(f"{what}: {type(error).__name__}: {error} ({' < '.join(reversed(places))})".replace("\n", " "))
