"""Run the test suite many times, several at once, and count what failed: ``python -m bench.repeat_suite``.

    python -m bench.repeat_suite [--times 20] [--beside 2] [--json FILE] [--budget SECONDS] [-- PYTEST WORDS]

A test that fails in one of twenty runs is a fault of the product or of the test. Runs beside each other are each
other's load. Every run has a directory of its own for what it writes, and is a line of the JSON file, written when it
ends: a bench that was cut off goes on where it was. What was printed of failed tests is kept beside that file.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run what is missing of the suite's runs; print a line each and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--beside", type=int, default=2, help="runs at the same time")
    parser.add_argument("--json", type=Path, default=Path("suite_runs.jsonl"))
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds; a run under way then is ended")
    parser.add_argument("words", nargs="*", help="pytest's, after --; default: -n auto")
    args = parser.parse_args()
    known = read(args.json)
    missing = iter(range(len(known) + 1, args.times + 1))
    deadline = time.monotonic() + args.budget
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(missing, None)
            left = deadline - time.monotonic()
            if number is None or left <= 0:
                return
            row = run_suite(args.words or ["-n", "auto"], left, args.json.with_suffix(f".{number}.log"))
            if row is None:
                return
            with lock:
                known.append(row)
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(
                f"run {number}: {row['tests']} tests, {row['seconds']:.0f} s, failed: {row['failed'] or 'none'}",
                flush=True,
            )

    workers = [threading.Thread(target=work) for _ in range(args.beside)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    failed = Counter(name for row in known for name in row["failed"])
    print(f"{len(known)} of {args.times} runs, {sum(not row['failed'] for row in known)} of them without a failure")
    for name, count in failed.most_common():
        print(f"{count:4d}  {name}")
    return 1 if failed or len(known) < args.times else 0


def run_suite(words: list[str], seconds: float, log: Path) -> dict[str, Any] | None:
    """Run the suite once and return its row; None if it was cut off. Its output is kept if a test failed."""
    with tempfile.TemporaryDirectory(prefix="suite.", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o1777)  # like /tmp: some tests become another user
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
        environ = os.environ | {"TMPDIR": folder, "FTMON_HOME": f"{folder}/home"}
        began = time.monotonic()
        output = Path(folder, "output")
        with output.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file
            )
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
                return None
        took = time.monotonic() - began
        # 0: all passed, 1: some failed; anything else is no run of the suite.
        row = (
            outcomes(report) if process.returncode in (0, 1) and report.exists() else {"tests": 0, "failed": ["pytest"]}
        )
        if row["failed"]:
            shutil.copy(output, log)
        return {**row, "seconds": round(took, 1), "time": time.time()}


def outcomes(report: Path) -> dict[str, Any]:
    """Return the number of tests that ran and the names of those that failed, from pytest's JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return {"tests": sum(case.find("skipped") is None for case in cases), "failed": failed}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the runs so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
