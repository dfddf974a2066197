"""CURVE keys for a hub that listens on TCP: who it is, who we are, and whom it lets in.

A hub has one pair a run (``curve.key`` in the run directory); its public half stands in the connection file. A user has
one pair for all (``$FTMON_HOME/keys/client.key``). A hub lets in its own user, and the public keys that
``$FTMON_HOME/keys/allowed`` lists, one a line with a remark behind it. The agents of a run on other hosts share one
pair made for that run (``agent.key``), which opens the agents' channels and no others. Every file is 0600 in a 0700
directory: not made with ``zmq.auth.create_certificates``, which leaves secrets readable by all.
"""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ..errors import RunDirError, UsageError
from ..host.private_files import make_private, read_private, write_private
from ..run.run_store import checked_home
from ..run.rundir import RunDir

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

ZAP_DOMAIN = "ftmon"
"""The domain under which the allow-list is asked (https://rfc.zeromq.org/spec/27/)."""

AGENT_DOMAIN = "ftmon-agents"
"""The domain of the agents' channels: the run's own agent key alone is let in there."""

_PUBLIC_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair; both halves are 40 characters of Z85 (https://rfc.zeromq.org/spec/32/)."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


def make_pair() -> KeyPair:
    """Make a new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def keys_dir() -> Path:
    """Return the directory of this user's own keys and allow-list, made 0700 if it is not there.

    Raises:
        RunDirError: it cannot be made, or is open to others.
    """
    path = checked_home() / "keys"
    try:
        make_private(path.parent)
        make_private(path)
    except OSError as error:
        raise RunDirError(f"{path}: cannot be made: {error.strerror}; set FTMON_HOME") from None
    RunDir(path).check()
    return path


def server_pair(run: RunDir) -> KeyPair:
    """Return the key pair of a run's hub, made the first time; a restarted hub keeps it.

    Raises:
        RunDirError: the file is damaged or open to others.
    """
    return _load_or_make(run.path / "curve.key")


def agent_pair(run: RunDir) -> KeyPair:
    """Return the key pair that a run's agents on other hosts use, made the first time.

    Raises:
        RunDirError: the file is damaged or open to others.
    """
    return _load_or_make(run.path / "agent.key")


def client_pair() -> KeyPair:
    """Return this user's key pair, made the first time.

    Raises:
        RunDirError: the file is damaged or open to others.
    """
    return _load_or_make(keys_dir() / "client.key")


def allowed() -> dict[str, str]:
    """Return the public keys that a hub of this user lets in, with a remark each; the user's own is among them.

    Raises:
        RunDirError: the list is damaged or open to others.
    """
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
    """Let a public key in, from now on.

    Raises:
        UsageError: it is not a public key.
    """
    if not _PUBLIC_KEY.fullmatch(public):
        raise UsageError(f"{public!r} is not a public key: it has 40 characters, as 'public' in the other side's file")
    listed = allowed() | {public: " ".join(remark.split())}
    _write_allowed(listed)


def disallow(public: str) -> None:
    """Let a public key in no more; open connections are not cut.

    Raises:
        UsageError: it is not on the list, or is this user's own, which is always let in.
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
    """Answers, for each new connection, whether its public key may come in. Reads the list anew every time."""

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the Z85 public key ``key`` is allowed; a list that cannot be read allows none."""
        del domain
        try:
            return key.decode("ascii", "replace") in allowed()
        except (RunDirError, OSError) as error:
            logging.getLogger(__name__).warning("no key is allowed: %s", error)
            return False


class _Agents:
    """Allows one key: the one made for the agents of this run."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        del domain
        return key == self._public


def start_authenticator(context: "zmq.Context[Any]", agent: str = "") -> "ThreadAuthenticator":
    """Start asking the allow-list about every CURVE connection to sockets of ``context``; ``stop()`` ends it.

    Args:
        context: where the sockets are.
        agent: the public key of the run's agents, allowed under ``AGENT_DOMAIN``; empty: none.
    """
    from zmq.auth.thread import ThreadAuthenticator  # brings asyncio with it; only a listening hub needs it

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain=ZAP_DOMAIN, credentials_provider=AllowList())
    authenticator.configure_curve_callback(domain=AGENT_DOMAIN, credentials_provider=_Agents(agent))
    return authenticator


def _load_or_make(path: Path) -> KeyPair:
    try:
        return msgspec.json.decode(read_private(path), type=KeyPair)
    except FileNotFoundError:
        pass
    except (msgspec.MsgspecError, ValueError) as error:
        raise RunDirError(f"{path}: is not a key file: {error}; remove it and a new one is made") from None
    write_private(path, msgspec.json.encode(make_pair()) + b"\n")
    # Two processes may have made one at the same time: the file decides.
    return msgspec.json.decode(read_private(path), type=KeyPair)
