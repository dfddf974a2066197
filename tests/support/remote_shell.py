"""A stand-in for ssh between hosts made of namespaces, and for pdsh on top of it.

The command ``ssh`` hands its three standard streams and its words to a thread of the test, over a UNIX socket; that
starts the command on the host asked for. As with the real one, nothing there descends from who called ``ssh``, and a
caller that is killed leaves its command running.
"""

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# The kernel ends an interpreter's path at the first space.
_SHEBANG = """\
#!/bin/sh
'''exec' {python} -S "$0" "$@"
' '''
"""

_SSH = """\
# Stands in for ssh: options, a host, a command line for its shell.
import json, socket, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    del words[: 2 if words[0] in ("-o", "-p", "-i", "-l") else 1]
asked = json.dumps([words[0].rpartition("@")[2], " ".join(words[1:])]).encode()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
    line.connect({address!r})
    socket.send_fds(line, [asked], [0, 1, 2])
    sys.exit(int(line.recv(16) or b"255"))
"""

_PDSH = """\
# Stands in for pdsh: runs the command on every host of -w, %n being the host's number. It quotes interpreter and
# script, which neither pdsh nor DeepSpeed does: both could not run from a folder whose name has a space.
import os, shlex, subprocess, sys
words = sys.argv[1:]
hosts, command = [], []
while words:
    word = words.pop(0)
    if word in ("-f", "-w"):
        value = words.pop(0)
        hosts = value.split(",") if word == "-w" else hosts
    elif word.startswith("-") and not command:
        continue
    else:
        command = [word, *words]
        break
line = " ".join(shlex.quote(word) if os.path.exists(word) else word for word in command)
if line.startswith("pkill"):
    sys.exit(0)
started = [subprocess.Popen(["ssh", host, line.replace("%n", str(place))]) for place, host in enumerate(hosts)]
sys.exit(max(abs(process.wait()) for process in started))
"""


class RemoteShell:
    """Serves ``ssh`` and ``pdsh``, put into ``tools``; ``enter``: the words that start a command on each host."""

    def __init__(self, tools: Path, enter: dict[str, list[str]], environ: dict[str, str]) -> None:
        self._enter = enter
        self._environ = environ
        self._folder = Path(tempfile.mkdtemp(prefix="ssh-"))  # a socket's path must be short
        address = self._folder / "s"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(address))
        self._socket.listen()
        for name, text in (("ssh", _SSH), ("pdsh", _PDSH)):
            words = {"python": shlex.quote(sys.executable), "address": str(address)}
            (tools / name).write_text((_SHEBANG + text).format(**words))
            (tools / name).chmod(0o755)
        threading.Thread(target=self._serve, name="remote-shell", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                threading.Thread(target=self._run, args=(caller,), daemon=True).start()

    def _run(self, caller: socket.socket) -> None:
        with caller:
            asked, streams, _, _ = socket.recv_fds(caller, 1 << 20, 3)
            try:
                status = self._start(*json.loads(asked), streams)
            finally:
                for stream in streams:
                    os.close(stream)
            with contextlib.suppress(OSError):
                caller.send(str(status).encode())

    def _start(self, host: str, line: str, streams: list[int]) -> int:
        if host not in self._enter:
            os.write(streams[2], f"ssh: Could not resolve hostname {host}: Name or service not known\n".encode())
            return 255
        ends = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        words = [*self._enter[host], "sh", "-c", line]
        return subprocess.run(words, **ends, env=self._environ, cwd="/", check=False).returncode
