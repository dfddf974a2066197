"""Coroutines of the main loop go on when the replies they wait for arrive, in the call that brings them."""

import select
import threading
from typing import Any

import pytest
from ftmon.trainer.host import loop
from ftmon.trainer.host.loop import Mailbox, Reply


def test_a_call_that_fails_leaves_others_waiting_and_work_in_a_thread_arrives_also_where_it_failed():
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
    posted: list[Any] = []
    ready = threading.Semaphore(0)

    def post(call: Any) -> None:
        posted.append(call)
        ready.release()

    seen: list[tuple[int, int]] = []
    for work in (lambda: 1, lambda: 1 // 0):
        loop.in_thread(work, post, "work", -1).then(lambda found: seen.append((found, threading.get_ident())))
        assert ready.acquire(timeout=200)
        posted.pop()()
    assert seen == [(1, threading.get_ident()), (-1, threading.get_ident())]


def test_a_flow_goes_on_in_the_call_that_brings_what_it_waits_for() -> None:
    first: Reply[str] = Reply()
    second: Reply[str] = Reply()
    seen: list[str] = []

    async def inner() -> str:
        return f"{await first} and {await second}"

    async def outer() -> None:
        seen.append("asked")
        seen.append(await inner())

    loop.start(outer())
    assert seen == ["asked"]
    second.arrive("two")  # replies may come in any order
    assert seen == ["asked"]
    first.arrive("one")
    assert seen == ["asked", "one and two"]
    loop.start(outer())  # what has arrived is not waited for
    assert seen[2:] == ["asked", "one and two"]
    first.then(seen.append)
    assert seen[4:] == ["one"]

    async def fail() -> None:
        raise ValueError(f"not {await third}")

    third: Reply[int] = Reply()
    loop.start(fail())
    with pytest.raises(ValueError, match="not 3"):
        third.arrive(3)
