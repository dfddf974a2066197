"""GPU memory before and after a scene, asked of ``nvidia-smi``: not of what is being judged."""

import subprocess
import time
from collections.abc import Collection

FREE_SECONDS = 8.0
NOISE_MIB = 8


def used(devices: Collection[int]) -> dict[int, int]:
    """Give the MiB in use on these GPUs, by index."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return {int(index): int(mib) for index, mib in rows if int(index) in devices}


def count() -> int:
    """Count the GPUs there are."""
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
    return len(done.stdout.splitlines())


def left(before: dict[int, int]) -> list[str]:
    """Say on which GPUs more is in use than before, once the driver has had its time."""
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        now = used(before)
        held = {gpu: mib - before.get(gpu, 0) for gpu, mib in now.items() if mib - before.get(gpu, 0) > NOISE_MIB}
        if not held or time.monotonic() > deadline:
            return [f"GPU {gpu}: {mib} MiB" for gpu, mib in held.items()]
        time.sleep(0.25)
