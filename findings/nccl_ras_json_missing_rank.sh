#!/usr/bin/env bash
# NCCL 2.28.9: the RAS service's JSON ("set format json", "status") is not valid JSON once a process of the job is gone:
# the entry of a missing rank lacks the comma between "nvml_dev" and "status". A monitor that parses the answer loses it
# exactly when a rank has died. NCCL 2.29.7 writes the comma. Needs two GPUs.
#
# Seen on two H200s (driver 580.159.04), 2026-11-28:
#   both ranks present: valid JSON, 2 ranks
#   one rank gone: Expecting ',' delimiter; with the comma added it parses: 1 rank present, 1 missing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv --system-site-packages "$folder/venv"
"$folder/venv/bin/pip" install -q nvidia-nccl-cu13==2.28.9 nvidia-cuda-runtime==13.0.96
cat > "$folder/ras.py" <<'PYTHON'
import ctypes, glob, json, os, re, site, socket, subprocess, sys, time

PORT = 28931
os.environ["NCCL_RAS_ADDR"] = f"localhost:{PORT}"


def library(pattern):
    folders = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("-packages"))]
    return ctypes.CDLL(next(path for folder in folders for path in glob.glob(f"{folder}/nvidia/{pattern}")))


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


def join(rank, unique):
    """Make this process rank ``rank`` of a communicator of two; return NCCL's library."""
    assert library("cu13/lib/libcudart.so.13").cudaSetDevice(rank) == 0
    nccl, communicator = library("nccl/lib/libnccl.so.2"), ctypes.c_void_p()
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2, unique, rank) == 0


def ask():
    with socket.create_connection(("localhost", PORT), timeout=5.0) as connection:
        connection.sendall(b"client protocol 2\ntimeout 2\nset format json\nstatus\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return answer[answer.index(b"{"):].decode()


if len(sys.argv) > 1:
    join(1, Id.from_buffer_copy(bytes.fromhex(sys.argv[1])))
    time.sleep(4.0)
    os._exit(0)
unique = Id()
assert library("nccl/lib/libnccl.so.2").ncclGetUniqueId(ctypes.byref(unique)) == 0
other = subprocess.Popen([sys.executable, __file__, bytes(unique).hex()])
join(0, unique)
(communicator,) = json.loads(ask())["communicators"]
assert communicator["ranks_count"] == 2, communicator
print("both ranks present: valid JSON, 2 ranks")
other.wait()
time.sleep(2.0)
text = ask()
try:
    json.loads(text)
except json.JSONDecodeError as error:
    (communicator,) = json.loads(re.sub(r'("nvml_dev": \d+)(\s+"status")', r"\1,\2", text))["communicators"]
    present, missing = communicator["ranks_count"], communicator["missing_ranks_count"]
    print(f"one rank gone: {error.msg}; with the comma added it parses: {present} rank present, {missing} missing")
    os._exit(0)
print("one rank gone: valid JSON: the behaviour has changed")
os._exit(1)
PYTHON
"$folder/venv/bin/python" "$folder/ras.py"
