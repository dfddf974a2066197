"""Spikes explained and leaks found, on a GPU: foreach against fused AdamW, a spike now and then, a planted leak.

    python bench/gpu/spikes.py --out spikes.json            all of it, in under three minutes on one H200

Each case trains the 0.5B model of ``loop.py`` under ``ftmon run``; the hub arms stacks by itself, and everything is
read from the run's recording. A verdict line follows each case; the last line says how many did not hold.
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
from typing import Any, NamedTuple

MIB = 2**20
LEAK_MIB = 8
SPIKE_MIB = 2048
SPIKE_EVERY = 20
known_sizes: list[int] = []


class Case(NamedTuple):
    """One training."""

    name: str
    options: tuple[str, ...]
    judge: "Callable[[Found], list[tuple[str, bool]]]"


class Found(NamedTuple):
    """What a run's recording has."""

    alerts: list[Any]
    causes: list[Any]
    steps: list[Any]
    results: list[Any]
    parameter_bytes: int

    def alert(self, kind: str, rule: str) -> Any:
        """Return the alert of a kind and rule as it stood at the end, or None."""
        for alert in self.alerts:
            if alert.kind == kind and alert.evidence.get("rule") == rule:
                return alert
        return None

    @property
    def transient(self) -> int:
        """The median transient of the optimizer phase, after the first steps."""
        sizes = sorted(record.allocated.transient for step in self.steps[3:] if (record := step.phase("optimizer")))
        return sizes[len(sizes) // 2] if sizes else 0


# The training, in a process of its own -----------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train in a plain loop or under ZeRO-2."""
    import torch
    from loop import MODELS
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(MODELS["qwen-0.5b"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=not args.fused, fused=args.fused)
    if args.zero:
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 1.0,
            "steps_per_print": 1_000_000,
        }
        model, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    count = [0]

    def spike(*_: Any) -> None:
        count[0] += 1
        if args.spike and count[0] % SPIKE_EVERY == 0:
            torch.empty(SPIKE_MIB * MIB, dtype=torch.uint8, device="cuda")

    optimizer.register_step_pre_hook(spike)
    samples = torch.randint(0, 32000, (args.steps, 512))
    kept: list[torch.Tensor] = []
    for (tokens,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(samples), batch_size=1):
        tokens = tokens.to("cuda:0")
        loss = model(input_ids=tokens, labels=tokens).loss
        if args.zero:
            model.backward(loss)
            model.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if args.leak:
            remember(kept)
        loss.item()  # as most loops do; without it the host runs ahead of the device
    torch.cuda.synchronize()


def remember(kept: list[Any]) -> None:
    """Keep a little more in every step."""
    import torch

    kept.append(torch.empty(LEAK_MIB * MIB, dtype=torch.uint8, device="cuda"))


# The verdicts ------------------------------------------------------------------------------------------------------


def near(size: int, wanted: int, share: float = 0.03) -> bool:
    """Tell whether a size is what it should be."""
    return abs(size - wanted) <= share * wanted


def plain_foreach(found: Found) -> list[tuple[str, bool]]:
    """One parameter-size of foreach temporaries in every step."""
    alert, size = found.alert("spike", "steady"), found.parameter_bytes
    evidence = alert.evidence if alert is not None else {}
    return [
        ("flagged", alert is not None),
        ("named foreach temporaries", evidence.get("cause_pattern") == "foreach_temporaries"),
        ("the transient is one parameter-size", near(found.transient, size)),
        ("the stacks find one parameter-size", near(evidence.get("cause_bytes", 0), size)),
        ("the remedy is a fused optimizer", "fused" in evidence.get("remedy", "")),
        ("which saves one parameter-size", near(evidence.get("saves_bytes", 0), size)),
    ]


def plain_fused(found: Found) -> list[tuple[str, bool]]:
    """None of it."""
    return [
        (
            "no spike of the optimizer",
            found.alert("spike", "steady") is None and found.alert("spike", "recent") is None,
        ),
        ("no transient to speak of", found.transient < 0.05 * found.parameter_bytes),
    ]


def zero_foreach(found: Found) -> list[tuple[str, bool]]:
    """Under ZeRO-2 the states are fp32: one fp32 copy of temporaries, on top of the upcast gradients.

    Which moment is the peak, the copy being made or the update with it, depends on what DeepSpeed has let go of.
    """
    alert, copy = found.alert("spike", "steady"), 2 * found.parameter_bytes
    parts = alert.evidence.get("cause_parts", {}) if alert is not None else {}
    return [
        ("flagged", alert is not None),
        ("the upcast gradients are named, one fp32 copy or more", parts.get("gradient_upcast", 0) > 0.97 * copy),
        (
            "foreach temporaries, where they are in the peak, are one fp32 copy",
            near(parts.get("foreach_temporaries", copy), copy),
        ),
        ("what is named is all of it", sum(parts.values()) > 0.9 * found.transient > 0),
    ]


def zero_fused(found: Found) -> list[tuple[str, bool]]:
    """The upcast gradients are left."""
    alert = found.alert("spike", "steady")
    return [
        ("flagged", alert is not None),
        ("named the upcast gradients", alert is not None and alert.evidence.get("cause_pattern") == "gradient_upcast"),
    ]


def planted(found: Found) -> list[tuple[str, bool]]:
    """A leak of 8 MiB a step, and a spike of 2 GiB in every twentieth step."""
    leak, spike = found.alert("leak", "trend"), found.alert("spike", "recent")
    rate = leak.evidence.get("bytes_per_step", 0) if leak is not None else 0
    stacks = spike.evidence.get("stacks", []) if spike is not None else []
    return [
        ("leak found", leak is not None),
        ("its rate", near(rate, LEAK_MIB * MIB)),
        (
            "the leak's place",
            leak is not None and "spikes.py" in leak.evidence.get("place", "") and "remember" in leak.title,
        ),
        ("spike flagged", spike is not None and near(spike.evidence["transient_bytes"], SPIKE_MIB * MIB, 0.05)),
        ("the spike's place", any(group["frames"][-1].endswith(" spike") for group in stacks if group["frames"])),
        ("caught in a step that had it", spike is not None and spike.evidence.get("cause_step", 1) % SPIKE_EVERY == 0),
    ]


CASES = [
    Case("plain-foreach", ("--steps", "80"), plain_foreach),
    Case("plain-fused", ("--steps", "80", "--fused"), plain_fused),
    Case("zero2-foreach", ("--steps", "80", "--zero"), zero_foreach),
    Case("zero2-fused", ("--steps", "80", "--zero", "--fused"), zero_fused),
    Case("planted", ("--steps", "200", "--fused", "--leak", "--spike"), planted),
]


def read(name: str) -> Found:
    """Read what the run recorded."""
    from ftmon.protocol.messages.control import Result
    from ftmon.protocol.messages.memory import Cause
    from ftmon.protocol.messages.telemetry import Step
    from ftmon.protocol.recording.reader import Reader
    from ftmon.protocol.run import rundir

    with Reader(rundir.find(name).recording) as reader:
        messages = [frame.message for frame in reader.frames(0, 10_000_000)]
        alerts = reader.alerts()
    causes = [message for message in messages if isinstance(message, Cause)]
    # A run without spikes is asked for nothing; it trains the same model as the others.
    known_sizes.extend(cause.parameter_bytes for cause in causes if cause.parameter_bytes)
    return Found(
        alerts,
        causes,
        [message for message in messages if isinstance(message, Step)],
        [message for message in messages if isinstance(message, Result)],
        known_sizes[-1] if known_sizes else 0,
    )


def run(case: Case, number: int) -> tuple[dict[str, Any], int]:
    """Run one case, print what was found; return the figures and how many verdicts did not hold."""
    began = time.monotonic()
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ = {**os.environ, **place, "MASTER_PORT": str(29700 + number)}
    command = [sys.executable, "-m", "ftmon.tui.cli", "run", "--plain", "--name", f"spikes-{case.name}", "--"]
    command += [sys.executable, str(Path(__file__).resolve()), "--train", *case.options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environ, check=False)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:])
        return {"exit": done.returncode}, 1
    found = read(f"spikes-{case.name}")
    print(f"\n### {case.name} ({time.monotonic() - began:.0f} s, {len(found.steps)} steps)\n")
    parameters = found.parameter_bytes / MIB
    print(f"optimizer transient, median: {found.transient / MIB:.1f} MiB; parameters: {parameters:.1f} MiB")
    for alert in found.alerts:
        if alert.kind in ("spike", "leak"):
            print(f"{alert.kind}: {alert.title}\n    {alert.text}")
    for cause in found.causes:
        print(
            f"armed {cause.phase or 'whole steps'} of step {cause.step}: {cause.armed_us / 1000:.2f} ms with stacks, "
            f"{cause.usual_us / 1000:.2f} ms usually; read in {cause.read_us / 1000:.1f} ms beside the training; "
            f"{cause.attributed_bytes / MIB:.1f} of {cause.transient_bytes / MIB:.1f} MiB have stacks"
            f"{'; ' + cause.note if cause.note else ''}"
        )
    for result in found.results:
        print(f"    {result.verb}: {result.text}")
    failed = 0
    for words, holds in case.judge(found):
        failed += not holds
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {words}")
    figures = {
        "transient_bytes": found.transient,
        "parameter_bytes": found.parameter_bytes,
        "alerts": [{"title": a.title, "text": a.text, "evidence": a.evidence} for a in found.alerts],
        "arming": [
            {"phase": c.phase, "step": c.step, "armed_us": c.armed_us, "usual_us": c.usual_us, "read_us": c.read_us}
            for c in found.causes
        ],
        "failed": failed,
        "seconds": round(time.monotonic() - began, 1),
    }
    return figures, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=40)
    for name in ("--fused", "--zero", "--leak", "--spike"):
        parser.add_argument(name, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="one case")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.train:
        train(args)
        return
    os.environ.setdefault("FTMON_HOME", tempfile.mkdtemp())
    results: dict[str, Any] = {}
    failures = 0
    for number, case in enumerate(CASES):
        if args.only in ("", case.name):
            results[case.name], failed = run(case, number)
            failures += failed
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
    print(f"\n{failures} verdicts did not hold" if failures else "\nall verdicts hold")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
