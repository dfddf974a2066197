"""CURVE keys of a hub that listens on TCP, of its clients and of agents, and the list of allowed clients.

A hub has one key pair per run (``curve.key`` in the run directory); its public key is in the connection file. A user
has one pair for all runs (``$FTMON_HOME/keys/client.key``). A hub accepts its own user, and the public keys in
``$FTMON_HOME/keys/allowed``, one per line, followed by a remark. The agents of a run on other hosts share one pair made
for that run (``agent.key``), which is accepted on the agents' channels only. Every file is 0600 in a 0700 directory;
``zmq.auth.create_certificates`` is not used because it leaves secrets readable by all.
"""

import logging
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ..errors import RunDirError, UsageError
from ..host.process import make_private, read_private, write_private
from ..run.rundir import RunDir, checked_home

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "ftmon"  # ZAP domain of the channels that accept the allow-list (https://rfc.zeromq.org/spec/27/)
AGENT_DOMAIN = "ftmon-agents"  # ZAP domain of the agents' channels, which accept only the run's agent key
_PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair; both halves are 40 characters of Z85 (https://rfc.zeromq.org/spec/32/)."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def make_pair() -> KeyPair:
    """Return a new key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def keys_dir() -> Path:
    """Return the directory of this user's keys and allow-list, 0700, made if missing; may raise ``RunDirError``."""
    path = checked_home() / "keys"
    try:
        make_private(path.parent)
        make_private(path)
    except OSError as error:
        raise RunDirError(f"{path}: cannot be made: {error.strerror}; set FTMON_HOME") from None
    RunDir(path).check()
    return path


def server_pair(run: RunDir) -> KeyPair:
    """Return the key pair of a run's hub, created on first use; a restarted hub keeps it."""
    return _load_or_make(run.path / "curve.key")


def agent_pair(run: RunDir) -> KeyPair:
    """Return the key pair of a run's agents on other hosts, created on first use."""
    return _load_or_make(run.path / "agent.key")


def client_pair() -> KeyPair:
    """Return this user's key pair, created on first use."""
    return _load_or_make(keys_dir() / "client.key")


def allowed() -> dict[str, str]:
    """Return the public keys that a hub of this user accepts, the user's own included, with their remarks."""
    found = {client_pair().public: "this user"}
    path = keys_dir() / "allowed"
    try:
        lines = read_private(path).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return found
    for number, line in enumerate(lines, 1):
        public, _, remark = line.strip().partition(" ")
        if not public or line.lstrip().startswith("# "):
            continue
        if not _PUBLIC_KEY.fullmatch(public):
            raise RunDirError(f"{path}:{number}: not a public key of 40 characters; correct or remove the line")
        found[public] = remark.strip()
    return found


def allow(public: str, remark: str = "") -> None:
    """Add a public key to the allow-list; raise ``UsageError`` if it is none."""
    if not _PUBLIC_KEY.fullmatch(public):
        raise UsageError(f"{public!r} is not a public key: it has 40 characters, as 'public' in the other side's file")
    _write_allowed(allowed() | {public: " ".join(remark.split())})


def disallow(public: str) -> None:
    """Remove a public key from the allow-list; open connections are not closed.

    Raises ``UsageError`` for a key that is not on it, and for this user's own, which is always accepted.
    """
    listed = allowed()
    if public == client_pair().public:
        raise UsageError(f"{public!r} is your own key; a hub of yours always lets you in")
    if public not in listed:
        hint = "" if _PUBLIC_KEY.fullmatch(public) else " (a public key has 40 characters)"
        raise UsageError(f"{public!r} is not allowed here, so nothing was removed{hint}; 'ftmon keys' lists who is")
    _write_allowed({key: remark for key, remark in listed.items() if key != public})


def _write_allowed(listed: dict[str, str]) -> None:
    own = client_pair().public
    text = "".join(f"{key} {remark}".rstrip() + "\n" for key, remark in listed.items() if key != own)
    write_private(keys_dir() / "allowed", text.encode())


class AllowList:
    """Decides for each new connection whether its public key is accepted: ``keys`` returns those that are."""

    def __init__(self, keys: Callable[[], Container[str]] = allowed) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the Z85 public key ``key`` is allowed; a list that cannot be read allows none."""
        del domain
        try:
            return key.decode("ascii", "replace") in self._keys()
        except (RunDirError, OSError) as error:
            logging.getLogger(__name__).warning("no key is allowed: %s", error)
            return False


def start_authenticator(context: "zmq.Context[Any]", agent: str = "") -> "ThreadAuthenticator":
    """Start checking every CURVE connection to sockets of ``context`` against the allow-list; ``stop()`` ends it.

    ``agent`` is the public key of the run's agents, allowed under ``AGENT_DOMAIN``; empty: none.
    """
    from zmq.auth.thread import ThreadAuthenticator  # imports asyncio; only a listening hub needs it

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=AllowList())
    authenticator.configure_curve_callback(domain=AGENT_DOMAIN, credentials_provider=AllowList(lambda: [agent]))
    return authenticator


def _load_or_make(path: Path) -> KeyPair:
    try:
        return msgspec.json.decode(read_private(path), type=KeyPair)
    except FileNotFoundError:
        pass
    except (msgspec.MsgspecError, ValueError) as error:
        raise RunDirError(f"{path}: is not a key file: {error}; remove it and a new one is made") from None
    write_private(path, msgspec.json.encode(make_pair()) + b"\n")
    # Two processes may create one at the same time: the file is authoritative.
    return msgspec.json.decode(read_private(path), type=KeyPair)
