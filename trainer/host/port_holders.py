"""Finds the process listening on a TCP port of this host, from /proc/net (proc(5)) and readable descriptors."""

import os
import pwd
from typing import NamedTuple

_LISTEN = "0A"
_COMMAND_LIMIT = 200


class PortHolder(NamedTuple):
    """A listening socket, and its process if it can be inspected."""

    user: str
    """The socket's owner: user name, or the uid if it has no name."""
    pid: int
    """0: its process cannot be inspected (it belongs to another user or container)."""
    command: str


def holder_of(port: int) -> PortHolder | None:
    """Return the process that listens on ``port``; None if there is none, or if it cannot be read."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for uid, inode in _listening(table, port):
            pid, command = _process_with(inode)
            return PortHolder(_user(uid), pid, command)
    return None


def _listening(table: str, port: int) -> list[tuple[int, str]]:
    try:
        with open(table) as file:
            rows = [line.split() for line in file.readlines()[1:]]
    except OSError:
        return []
    return [
        (int(row[7]), row[9]) for row in rows if len(row) > 9 and row[3] == _LISTEN and row[1].endswith(f":{port:04X}")
    ]


def _process_with(inode: str) -> tuple[int, str]:
    wanted = f"socket:[{inode}]"
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with os.scandir(f"/proc/{name}/fd") as entries:
                if any(_link(entry.path) == wanted for entry in entries):
                    return int(name), _command(name)
        except OSError:
            continue
    return 0, ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _command(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().decode("utf-8", "replace").split("\0")
    except OSError:
        return ""
    text = " ".join(word for word in words if word)
    return text if len(text) <= _COMMAND_LIMIT else f"{text[:_COMMAND_LIMIT]}..."


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
