"""GPU memory before and after a scene, asked of ``nvidia-smi``: not of what is being judged."""

import subprocess
import time

FREE_SECONDS = 8.0
NOISE_MIB = 8


def used() -> dict[int, int]:
    """Give the MiB in use on each GPU."""
    query = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    rows = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
    return {int(index): int(mib) for index, mib in rows}


def left(before: dict[int, int]) -> list[str]:
    """Say on which GPUs more is in use than before, once the driver has had its time."""
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        now = used()
        held = {gpu: mib - before.get(gpu, 0) for gpu, mib in now.items() if mib - before.get(gpu, 0) > NOISE_MIB}
        if not held or time.monotonic() > deadline:
            return [f"GPU {gpu}: {mib} MiB" for gpu, mib in held.items()]
        time.sleep(0.25)
