"""Keys on disk: private, made once, and an allow-list that fails closed."""

import os
import stat
from pathlib import Path

import pytest
from ftmon.protocol.errors import RunDirError, UsageError
from ftmon.protocol.link import keys
from ftmon.protocol.run import rundir

pytestmark = pytest.mark.usefixtures("private_home")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_key_file_is_private_even_under_an_open_umask(private_home: Path) -> None:
    before = os.umask(0)
    try:
        keys.client_pair()
        keys.allow(keys.make_pair().public)
    finally:
        os.umask(before)
    assert mode(private_home / "keys") == 0o700
    assert mode(private_home / "keys" / "client.key") == 0o600
    assert mode(private_home / "keys" / "allowed") == 0o600


def test_a_pair_is_made_once_and_a_secret_that_others_can_read_or_is_damaged_is_refused(private_home):
    run = rundir.create("demo", ["ftmon"], "demo")
    assert keys.client_pair() == keys.client_pair()
    assert keys.server_pair(run) == keys.server_pair(run)
    assert keys.server_pair(run) != keys.client_pair()
    assert keys.client_pair().secret not in f"{keys.client_pair()!r} {keys.client_pair()}"
    keys.client_pair()
    (private_home / "keys" / "client.key").chmod(0o644)
    with pytest.raises(RunDirError, match="chmod 600"):
        keys.client_pair()
    (private_home / "keys" / "client.key").chmod(0o600)
    (private_home / "keys" / "client.key").write_text("{")
    with pytest.raises(RunDirError, match=r"client\.key: is not a key file.*remove it"):
        keys.client_pair()


def test_the_list_holds_who_was_allowed_and_the_user_and_nobody_else() -> None:
    friend, stranger = keys.make_pair(), keys.make_pair()
    keys.allow(friend.public, "laptop\nof a friend")
    assert keys.allowed() == {keys.client_pair().public: "this user", friend.public: "laptop of a friend"}
    let_in = keys.AllowList()
    assert let_in.callback(keys.ZAP_DOMAIN, friend.public.encode())
    assert let_in.callback(keys.ZAP_DOMAIN, keys.client_pair().public.encode())
    assert not let_in.callback(keys.ZAP_DOMAIN, stranger.public.encode())
    keys.disallow(friend.public)
    assert not let_in.callback(keys.ZAP_DOMAIN, friend.public.encode())


def test_a_damaged_list_and_one_that_others_can_write_let_nobody_in(private_home: Path) -> None:
    friend = keys.make_pair().public
    keys.allow(friend)
    assert keys.AllowList().callback(keys.ZAP_DOMAIN, friend.encode())
    (private_home / "keys" / "allowed").chmod(0o666)
    assert not keys.AllowList().callback(keys.ZAP_DOMAIN, friend.encode())
    (private_home / "keys" / "allowed").chmod(0o600)
    (private_home / "keys" / "allowed").write_text("# my laptops\n\nnonsense\n")
    with pytest.raises(RunDirError, match="allowed:3: not a public key"):
        keys.allowed()
    assert not keys.AllowList().callback(keys.ZAP_DOMAIN, keys.client_pair().public.encode())


def test_what_is_no_key_and_removing_one_that_is_not_let_in_are_refused(private_home: Path) -> None:
    other = keys.make_pair().public
    keys.allow(other, "a colleague")
    with pytest.raises(UsageError, match="is not a public key"):
        keys.allow("ssh-ed25519 AAAA")
    with pytest.raises(UsageError, match="is not allowed here, so nothing was removed"):
        keys.disallow(keys.make_pair().public)
    with pytest.raises(UsageError, match="a public key has 40 characters"):
        keys.disallow("")
    with pytest.raises(UsageError, match="is your own key"):
        keys.disallow(keys.client_pair().public)
    assert other in keys.allowed()
    keys.disallow(other)
    assert other not in keys.allowed()
