"""Forks of one process that has imported everything: the imports are paid for once in a session of tests.

``fork_server.py SOCKET PID MODULE`` forks a child for each request until the process PID is gone. A request is a line
of JSON: the child's environment and a plan, with which it calls ``run`` of the module. What it prints is the answer.
Where the module has ``become`` instead, the child goes on with that as if it were the program.
"""

import gc
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))


def answer(connection: socket.socket, module: Any) -> None:
    """Do what a request asks for, in a process of its own."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(connection.makefile().readline())
    for place in (1, 2):
        os.dup2(connection.fileno(), place)
    os.environ.clear()
    os.environ.update(request["environment"])
    connection.close()
    if hasattr(module, "become"):
        module.become(request["plan"])
        return
    try:
        module.run(request["plan"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def main() -> None:
    path, watched = Path(sys.argv[1]), psutil.Process(int(sys.argv[2]))
    module = importlib.import_module(sys.argv[3])
    # DeepSpeed collects garbage for every engine: not again and again in what was imported.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{path}.new")
        server.listen(64)
        os.rename(f"{path}.new", path)
        server.settimeout(1.0)
        while watched.is_running() and watched.status() != psutil.STATUS_ZOMBIE:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            if not os.fork():
                server.close()
                answer(connection, module)
                return
            connection.close()
    for end in (".sock", ".lock", ".log"):
        path.with_suffix(end).unlink(missing_ok=True)
    shutil.rmtree(path.with_suffix(".cache"), ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # whatever hangs


if __name__ == "__main__":
    main()
