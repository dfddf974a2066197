"""How long ``ftmon --help`` takes, and what it imports: ``python bench/startup.py [--runs N]``.

Each figure is a whole process, measured from outside, after one that warms the file cache. The baseline is the same
interpreter doing nothing, so that a slow machine does not look like a slow ftmon.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time

HEAVY = ("torch", "deepspeed", "transformers", "textual", "rich", "zmq", "msgspec", "sqlite3", "yaml")


def seconds(command: list[str], runs: int) -> list[float]:
    """Time whole processes, the first left out."""
    found: list[float] = []
    for _ in range(runs + 1):
        begun = time.perf_counter()
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        found.append(time.perf_counter() - begun)
    return found[1:]


def imported() -> list[str]:
    """Name the heavy modules that ``ftmon --help`` imports: none, if all is well."""
    code = (
        "import sys\nfrom ftmon.tui.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print(*(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr.split()


def main() -> None:
    """Measure and print one JSON object; times in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    program = shutil.which("ftmon")
    if program is None:
        sys.exit("bench/startup.py: no ftmon on PATH: activate the environment it is installed in")
    commands = {
        "python_nothing": [sys.executable, "-c", "pass"],
        "ftmon_help": [program, "--help"],
        "ftmon_version": [program, "--version"],
        "ftmon_ls": [program, "ls", "--json"],
    }
    result: dict[str, object] = {"runs": runs, "heavy_modules_imported_by_help": imported()}
    for name, command in commands.items():
        times = sorted(seconds(command, runs))
        result[name] = {
            "median_ms": round(statistics.median(times) * 1e3, 1),
            "p95_ms": round(times[int(len(times) * 0.95) - 1] * 1e3, 1),
            "worst_ms": round(times[-1] * 1e3, 1),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
