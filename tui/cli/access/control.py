"""Sends a command to a hub and receives its two replies."""

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from ....protocol.errors import HubError, UsageError
from ....protocol.link.sockets import peer_socket
from ....protocol.messages import wire
from ....protocol.messages.control import Accepted, Result
from ....protocol.messages.verbs import Verb
from ....protocol.run.rundir import HubFile

ACCEPT_SECONDS = 10.0
RESULT_SECONDS = 120.0
"""Time limit of a result: an escalating kill waits after INT and TERM."""


def ask(
    hub: HubFile,
    verb: Verb,
    *,
    on_accepted: Callable[[str], None] = lambda text: None,
    accept_seconds: float = ACCEPT_SECONDS,
    result_seconds: float = RESULT_SECONDS,
) -> Result:
    """Send a command to a run's hub and wait for its result.

    Args:
        hub: the connection file of a living hub.
        verb: one of ``verbs.HUB``.
        on_accepted: called with the hub's text when it accepts.
        accept_seconds: time limit of the acceptance.
        result_seconds: time limit of the result after that.

    Raises:
        UsageError: the command has text that is not UTF-8.
        HubError: the hub refused, or did not answer in time.
    """
    command = verb.command(secrets.token_hex(8))
    try:
        msgspec.msgpack.encode(command)  # as it is: wire.encode replaces what is not UTF-8
    except UnicodeEncodeError:
        raise UsageError(f"{command.verb}: what is sent to the run must be UTF-8") from None
    message = wire.encode("cli", 1, time.time(), command)
    context: zmq.Context[Any] = zmq.Context()
    socket = peer_socket(context, "control")
    try:
        socket.connect(hub.addresses["control"])
        socket.send_multipart(message)
        deadline = time.monotonic() + accept_seconds
        accepted = False
        while (left := deadline - time.monotonic()) > 0:
            if not socket.poll(round(left * 1000) or 1):
                break
            answer = _decode(socket.recv_multipart())
            if isinstance(answer, Accepted) and answer.id == command.id:
                if not answer.ok:
                    raise HubError(answer.text)
                on_accepted(answer.text)
                accepted = True
                deadline = time.monotonic() + result_seconds
            elif isinstance(answer, Result) and answer.id == command.id:
                return answer
    finally:
        socket.close()
        context.term()
    waited = result_seconds if accepted else accept_seconds
    raise HubError(f"the hub (pid {hub.process.pid}) gave no {'result' if accepted else 'answer'} in {waited:.0f} s")


def _decode(frames: list[bytes]) -> wire.Message | None:
    if len(frames) != 2:
        return None
    wire.decode_header(frames[0])
    return wire.decode_body(frames[1])
