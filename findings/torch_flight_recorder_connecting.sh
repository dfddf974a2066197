#!/usr/bin/env bash
# PyTorch 2.11 with NCCL 2.28.9: while a rank waits inside a communicator's first collective for peers that have not
# called it, the flight recorder reports that collective as "completed", and NCCL's RAS service counts no collective. Both
# name the state of every later collective rightly, so a monitor must not trust either for a call that has not returned.
# Needs two GPUs.
#
# Seen on two H200s (driver 580.159.04), 2026-11-28:
#   rank 0 is in all_reduce for 6 s; flight recorder: completed; RAS: 0 collectives
#   in the second one: flight recorder: scheduled; RAS: 2 collectives
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv --system-site-packages "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.11.0
cat > "$folder/connect.py" <<'PYTHON'
import json, os, socket, subprocess, sys, threading, time

PORT, SECONDS = 28933, 6.0
os.environ |= {"NCCL_RAS_ADDR": f"localhost:{PORT}", "TORCH_FR_BUFFER_SIZE": "100"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "28934", "WORLD_SIZE": "2"}
os.environ["RANK"] = rank = sys.argv[1] if len(sys.argv) > 1 else "0"

import torch
import torch.distributed as dist


def seen():
    """Return what the flight recorder says of this rank's last collective, and how many RAS has counted for it."""
    entries = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json())["entries"]
    with socket.create_connection(("localhost", PORT), timeout=5.0) as connection:
        connection.sendall(b"client protocol 2\ntimeout 2\nset format json\nstatus\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    mine = [one for c in json.loads(answer[answer.index(b"{"):])["communicators"] for one in c["ranks"]]
    counts = [sum(one["collective_counts"].values()) for one in mine if one["pid"] == os.getpid()]
    return entries[-1]["state"], sum(counts)


def reduce(count):
    tensor = torch.ones(1, device="cuda")
    dist.all_reduce(tensor)
    tensor.item()


torch.cuda.set_device(int(rank))
if rank == "1":
    dist.init_process_group("nccl", device_id=torch.device("cuda", 1))
    time.sleep(2 * SECONDS)
    reduce(1)
    time.sleep(2 * SECONDS)
    reduce(2)
    os._exit(0)
other = subprocess.Popen([sys.executable, __file__, "1"])
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
found = []
for count in (1, 2):
    call = threading.Thread(target=reduce, args=(count,))
    call.start()
    time.sleep(SECONDS)
    assert call.is_alive()
    found.append(seen())
    call.join()
first, second = found
print(f"rank 0 is in all_reduce for 6 s; flight recorder: {first[0]}; RAS: {first[1]} collectives")
print(f"in the second one: flight recorder: {second[0]}; RAS: {second[1]} collectives", flush=True)
other.wait()
os._exit(found != [("completed", 0), ("scheduled", 2)])
PYTHON
"$folder/venv/bin/python" "$folder/connect.py"
