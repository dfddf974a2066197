"""Starts ranks as DeepSpeed's launcher does, one for each JSON object of ``fake_rank.py``'s options in argv."""

import os
import subprocess
import sys
import time
from pathlib import Path

RANK = Path(__file__).with_name("fake_rank.py")


def main():
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), options], env={**os.environ, "RANK": str(rank)})
        for rank, options in enumerate(sys.argv[1:])
    ]
    alive = set(ranks)
    while alive:
        for process in list(alive):
            status = process.poll()
            if status is None:
                continue
            alive.discard(process)
            if status != 0:
                for other in alive:
                    other.terminate()
                for other in alive:
                    other.wait()
                print(f"{process.args} exits with return code = {status}", flush=True)
                sys.exit(status if status > 0 else 128 - status)
        time.sleep(0.2)


if __name__ == "__main__":
    main()
