"""``ftmon attach ssh://[USER@]HOST[:PORT][/RUN]``: watches a run of another host over ssh, without open ports."""

import os
import re
import shlex
from argparse import Namespace
from typing import NamedTuple

from ....protocol.errors import FtmonError, UsageError
from ....protocol.run import exits
from ...source.live import LiveSource
from ...source.ssh import SshCommand, SshEndpoint, SshError
from .remote import watch_remote

SSH_ENV = "FTMON_SSH"
"""OpenSSH client command with options, if not ``ssh``."""
REMOTE_ENV = "FTMON_REMOTE"
"""Path of ftmon on the remote host, if it is not on the PATH of ssh commands: ``~/venv/bin/ftmon``."""

_URL = re.compile(
    r"ssh://(?:([^@/\s-][^@/\s]*)@)?(\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]-][^\s:/@\[\]]*)(?::(\d{1,5}))?(?:/([^/\s]*))?/?"
)
_NOT_FOUND, _SSH_FAILED = 127, 255
_NO_COMMAND = ("there is no command", "invalid choice")
"""Errors of the remote parser for an unknown command, in this version and in earlier ones."""


class Place(NamedTuple):
    """A run on another host; an empty ``run`` is its newest one."""

    host: str
    user: str
    port: str
    run: str


class SshSource(LiveSource):
    """Follows a run over ssh; ``close`` ends the connection too."""

    def __init__(self, endpoint: SshEndpoint) -> None:
        """Use an endpoint, which must be open."""
        super().__init__(endpoint=endpoint, info=endpoint.info)
        self._ssh = endpoint

    def close(self) -> None:
        """End the threads, close the sockets, end the connection; the run continues."""
        super().close()
        self._ssh.close()


def parse_place(text: str) -> Place:
    """Parse ``ssh://[USER@]HOST[:PORT][/RUN]``.

    Raises:
        UsageError: it is not of that form.
    """
    found = _URL.fullmatch(text)
    if found is None or (found[3] and not 0 < int(found[3]) <= 65535):
        raise UsageError(f"{text}: must be ssh://[USER@]HOST[:PORT][/RUN]")
    return Place(found[2].strip("[]"), found[1] or "", found[3] or "", found[4] or "")


def command(place: Place) -> SshCommand:
    """Return the words of the ssh command for a run."""
    relay = f"{os.environ.get(REMOTE_ENV) or 'ftmon'} relay"
    port, user = ("-p", place.port) if place.port else (), ("-l", place.user) if place.user else ()
    return SshCommand(shlex.split(os.environ.get(SSH_ENV) or "ssh"), [*port, *user, "--", place.host], relay, place.run)


def attach_ssh(arguments: Namespace) -> int:
    """Watch a run of another host, in the app or in plain lines."""
    place = parse_place(arguments.run)
    endpoint = SshEndpoint(command(place))
    try:
        _open(endpoint, place)
    except BaseException:  # also ctrl-c at the password prompt
        endpoint.close()
        raise
    source = SshSource(endpoint)
    try:
        return watch_remote(
            source,
            arguments,
            [_address(place, endpoint.info.id)],
            lambda: UsageError(f"{arguments.run}: the hub there does not answer"),
        )
    finally:
        source.close()


def _open(endpoint: SshEndpoint, place: Place) -> None:
    try:
        endpoint.open()
    except SshError as error:
        raise UsageError(_explain(place, error)) from None
    except FtmonError as error:
        raise UsageError(f"{place.host}: {error}") from None


def _address(place: Place, run_id: str) -> str:
    """Return the address of this run, as another one may be the newest later."""
    user, port = f"{place.user}@" if place.user else "", f":{place.port}" if place.port else ""
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"ssh://{user}{host}{port}/{run_id or place.run}"


def _explain(place: Place, error: SshError) -> str:
    """Return the reason of a missing connection in one line."""
    words = str(error).removeprefix("ftmon: ")
    if error.status == _NOT_FOUND:
        return (
            f"{place.host}: no 'ftmon' there on the PATH of a command ({words or 'not found'}); "
            f"name it: {REMOTE_ENV}='~/venv/bin/ftmon'"
        )
    if error.status == _SSH_FAILED:
        return f"{place.host}: {words or 'ssh failed'}"
    if error.status == exits.WRONG_USAGE and any(text in words for text in _NO_COMMAND):
        return f"{place.host}: the ftmon there has no command 'relay'; install the same version on both sides"
    return f"{place.host}: {words or f'ftmon relay ended with status {error.status}'}"
