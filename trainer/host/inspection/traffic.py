"""Reads the bytes sent and received per TCP connection from the kernel's sock_diag(7) interface.

``/proc/PID/io`` counts read(2) and write(2) only; bytes of send(2) and recv(2), as Python's sockets use, are
counted by the connection itself (``struct tcp_info`` of linux/tcp.h). No privileges are needed.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Mapping

_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_INFO = 2
"""INET_DIAG_INFO: the attribute that holds ``struct tcp_info``."""
_MESSAGE_BYTES = 72
_INODE_AT = 68
_ACKED_AT = 120
"""Offset of ``tcpi_bytes_acked``, followed by ``tcpi_bytes_received``; Linux 4.1."""
_TIMEOUT_SECONDS = 0.5
_LARGEST_REPLY = 1 << 18


def by_socket() -> dict[int, int]:
    """Return, by socket inode, the bytes acknowledged plus received; empty if the kernel does not report them.

    Covers the connections of the caller's network namespace.
    """
    found: dict[int, int] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, AttributeError, struct.error):
            found |= _of_family(family)
    return found


def of_process(pid: int, sockets: Mapping[int, int]) -> int:
    """Return the bytes of all TCP connections that a process has open; 0 if its descriptors are not readable."""
    if not sockets:
        return 0
    total = 0
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError, ValueError):
                target = os.readlink(entry.path)
                if target.startswith("socket:["):
                    total += sockets.get(int(target[8:-1]), 0)
    return total


def _of_family(family: int) -> dict[int, int]:
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.settimeout(_TIMEOUT_SECONDS)
        body = struct.pack("=BBBBI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, 0xFFFFFFFF)
        link.send(struct.pack("=IHHII", 16 + len(body), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
        while True:
            reply = link.recv(_LARGEST_REPLY)
            at = 0
            while at + 16 <= len(reply):
                length, kind = struct.unpack_from("=IH", reply, at)
                if kind in (_DONE, _ERROR) or length < 16:
                    return found
                _add(reply, at + 16, at + length, found)
                at += (length + 3) & ~3


def _add(reply: bytes, at: int, end: int, found: dict[int, int]) -> None:
    (inode,) = struct.unpack_from("=I", reply, at + _INODE_AT)
    at += _MESSAGE_BYTES
    while at + 4 <= end:
        length, kind = struct.unpack_from("=HH", reply, at)
        if length < 4:
            return
        if kind == _INFO and length >= 4 + _ACKED_AT + 16 and inode:
            found[inode] = sum(struct.unpack_from("=QQ", reply, at + 4 + _ACKED_AT))
        at += (length + 3) & ~3
