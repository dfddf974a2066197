"""Real out-of-memory errors on a GPU: what ftmon says of each, and one that is held, looked at and let go.

    python bench/gpu/oom.py [--json FILE] [--only backward,recompute,optimizer,fragmentation,logits,large,hold]

Each is a process of its own under ``ftmon run`` (``oom_scene.py``) with a limit of 12 GiB, which makes it quick.
Prints what was said of each; ``ok`` means the verdict that the scene was made for, with parts that add up to what was
allocated. Needs one GPU with 16 GiB free; about two minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("oom_scene.py")
FTMON = [sys.executable, "-m", "ftmon.tui.cli"]
SECONDS = 120.0
WANTED = {
    "backward": ("longer_batch", "backward"),
    "recompute": ("longer_batch", "backward"),
    "optimizer": ("optimizer_states", "optimizer"),
    "fragmentation": ("fragmentation", ""),
    "logits": ("logits", "backward"),
    "large": ("too_large", ""),
    "hold": ("longer_batch", ""),
}
"""The verdict, and the phase where it matters."""
CONSOLE = (
    "frame",
    "own()",
    "tuple(batch.shape)",
    "memory()",
    "tensors(5)",
    "retry()",
    "free('ballast')",
    "retry()",
    "memory()",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="")
    parser.add_argument("--only", default=",".join(WANTED))
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ftmon-oom-") as home:
        os.environ["FTMON_HOME"] = home
        for name in args.only.split(","):
            results.append(hold(name) if name == "hold" else play(name))
            print(told(results[-1]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(results, indent=1))
    return 0 if all(result["ok"] for result in results) else 1


def play(name: str) -> dict[str, Any]:
    """Let one scene run out of memory, and read what was said of it."""
    begun = time.monotonic()
    ended = ftmon("run", "--plain", "--name", name, "--", sys.executable, str(SCRIPT), name)
    return judged(name, begun, {"output": ended[-2000:]})


def hold(name: str) -> dict[str, Any]:
    """Hold a real failure, free what filled the device, see that the request fits then, and let go."""
    begun = time.monotonic()
    options = ["--on-oom", "hold", "--allow-console", "--hold-timeout", str(SECONDS)]
    ftmon("run", "--detach", "--name", name, *options, "--", sys.executable, str(SCRIPT), name)
    held = wait(lambda: json.loads(ftmon("status", name, "--json") or "{}").get("rank_states") == {"held": 1})
    answers = [(code, ftmon("console", name, "--rank", "0", "-c", code).strip()) for code in CONSOLE if held]
    released = ftmon("release", name).strip()
    ended = wait(lambda: "failed" in ftmon("status", name).split("\n")[0])
    result = judged(name, begun, {"console": answers, "released": released, "held": held, "ended": ended})
    retries = [answer for code, answer in answers if code == "retry()"]
    checks = {
        "it was held": held,
        "it did not fit at first": bool(retries) and "does not fit" in retries[0],
        "freeing freed": any(code.startswith("free") and answer.startswith("freed") for code, answer in answers),
        "then it fitted": bool(retries) and "fit now" in retries[-1],
        "it was released": released == "rank 0 released",
        "and failed as without ftmon": ended,
    }
    return {**result, "checks": checks, "ok": result["ok"] and all(checks.values())}


def judged(name: str, begun: float, more: dict[str, Any]) -> dict[str, Any]:
    text = ftmon("oom", name, "--json")
    if not text:
        return {"scene": name, "ok": False, "seconds": time.monotonic() - begun, **more}
    report = json.loads(text)["reports"][-1]
    oom, verdict = report["oom"], report["verdict"]
    runs = Path(os.environ["FTMON_HOME"], "runs")
    snapshot = next(runs.glob(f"{name}-*/{oom.get('snapshot') or 'none'}"), None)
    opened = json.loads(ftmon("oom", str(snapshot), "--json") or "{}") if snapshot is not None else {}
    kind, phase = WANTED[name]
    adds_up = sum(oom.get("parts", {}).values()) == oom["allocated_bytes"]
    return {
        "scene": name,
        "ok": verdict["kind"] == kind and phase in ("", oom["phase"]) and adds_up and snapshot is not None,
        "parts_add_up": adds_up,
        "verdict": verdict,
        "remedies": report["remedies"],
        "oom": {key: value for key, value in oom.items() if key not in ("segments", "holders")},
        "of_the_snapshot": opened["reports"][-1]["verdict"]["kind"] if opened else "",
        "seconds": time.monotonic() - begun,
        **more,
    }


def told(result: dict[str, Any]) -> str:
    lines = [f"{'ok   ' if result['ok'] else 'WRONG'} {result['scene']:<14} {result['seconds']:5.1f} s"]
    if "verdict" in result:
        verdict, oom = result["verdict"], result["oom"]
        lines[0] += f"  {verdict['kind']} in {oom['phase']} (by its snapshot: {result['of_the_snapshot'] or 'none'})"
        lines += [f"    {verdict['text']}", *(f"    - {line}" for line in verdict.get("evidence", []))]
        lines += [
            f"    {number}. {remedy['kind']} {remedy.get('bound', '')} {remedy.get('frees_bytes', 0) / 2**30:.2f} GiB"
            for number, remedy in enumerate(result["remedies"], 1)
        ]
        lines.append(f"    stack ({oom.get('stack_of', 'failing')}): {(oom.get('stack') or ['none'])[-1]}")
    else:
        lines.append(f"    nothing was said: {result.get('output', '')[-500:]}")
    for code, answer in result.get("console", []):
        lines.append(f"    >>> {code}")
        lines += [f"        {line}" for line in answer.splitlines()]
    lines += [f"    {'ok' if good else 'WRONG'}: {what}" for what, good in result.get("checks", {}).items()]
    return "\n".join(lines)


def ftmon(*words: str) -> str:
    done = subprocess.run([*FTMON, *words], capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    if done.returncode and words[0] in ("oom", "release"):
        print(f"    ftmon {' '.join(words[:2])}: {done.stderr.strip()}", flush=True)
    return done.stdout


def wait(found: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found():
            return True
        time.sleep(0.3)
    return False


if __name__ == "__main__":
    sys.exit(main())
