"""Calls that threads post reach the main loop."""

import select

import pytest
from ftmon.trainer.host.loop import Mailbox


def test_a_call_that_fails_leaves_those_behind_it_waiting_and_the_main_loop_awake() -> None:
    mailbox, made = Mailbox(), list[str]()
    mailbox.post(lambda: made.append("first"))
    mailbox.post(lambda: made.append(1 // 0))
    mailbox.post(lambda: made.append("last"))
    with pytest.raises(ZeroDivisionError):
        mailbox.drain()
    assert made == ["first"]
    assert select.select([mailbox.fileno()], [], [], 0)[0]
    mailbox.drain()
    assert made == ["first", "last"]
    assert not select.select([mailbox.fileno()], [], [], 0)[0]
