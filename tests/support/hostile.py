"""What nobody honest sends: text that a terminal would obey, and frames that are broken in every way there is.

for frames in Frames(seed=1).telemetry(): ...     # envelopes without end, the same for the same seed
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import Accepted, Answer, Command, Query, Result
from ftmon.protocol.messages.wire import Message
from messages import EXAMPLES

OSC = "\x1b]0;PWNED\x07"  # sets the window's title
CLEAR = "\x1b[2J\x1b[77;77HPWNED"
STRING = "\x1bP+qPWNED\x1b\\"  # a device control string: some terminals type its answer into the shell
C1 = "\x9b77;77HPWNED\x9d0;PWNED\x9c"  # the same as single characters; in UTF-8 a terminal may obey them too
BELL_AND_RETURN = "\aPWNED\r\x08\x08PWNED\x7f"
BIDI = "\u202ePWNED\u2066"
SPLIT = "PWNED\n\x1b[1A\x1b[2KPWNED\u2028\x85PWNED"
UNSEEN = "PWN\u200bED\u2060PWNED\ufeffPWNED\U000e0041"
"""Zero-width characters and a tag: they make two names look alike."""
HOSTILE = OSC + CLEAR + STRING + C1 + BELL_AND_RETURN + BIDI + SPLIT + UNSEEN
TRACES = tuple(
    text.encode()
    for text in (
        OSC, "\x1b]0;PWNED", "\x1b[77;77H", "\x1bP+qPWNED", "\x9b", "\x9d", "\x9c", "\x85", "\aPWNED", "PWNED\x7f",
        "\u202e", "\u2066", "\u2028", "PWNED\r\x08", "\u200b", "\u2060", "\ufeff", "\U000e0041",
    )
)  # fmt: skip
"""Bytes that must never reach a terminal."""


def with_hostile_text(value: Any) -> Any:
    """Return a message, or any plain value, with every string in it made hostile, as far as its type allows it."""
    if isinstance(value, msgspec.Struct):
        fields = type(value).__struct_fields__
        changed = {name: with_hostile_text(getattr(value, name)) for name in fields}
        for name in fields:  # a field that takes certain words only keeps the one it has
            one = msgspec.structs.replace(value, **{name: changed[name]})
            try:
                msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(value))
            except msgspec.ValidationError:
                changed[name] = getattr(value, name)
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, str):
        return f"{value[:12]}{HOSTILE}"
    if isinstance(value, list | tuple):
        return [with_hostile_text(each) for each in value]
    if isinstance(value, dict):
        return {with_hostile_text(key): with_hostile_text(each) for key, each in value.items()}
    return value


_CONTROL = (Command, Accepted, Result, Query, Answer)
_QUERIES = ("info", "frames", "state_at", "memory", "series", "training", "alerts", "logs", "step_time", "seq_at",
            "close", "")  # fmt: skip
_VERBS = ("stacks", "snapshot", "identify", "ping", "stacks", "", "reboot")
_ARGUMENTS = ("t", "t0", "t1", "rank", "limit", "columns", "after_seq", "before_seq", "text", "step", "ranks", "self")
_NUMBERS = (0, 1, -1, 7, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.5, 1e300, -1e300,
            float("nan"), float("inf"), float("-inf"))  # fmt: skip


class Frames:
    """Makes broken, half broken and whole envelopes; the largest, which are rare, have up to a MiB."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sequence = itertools.count(1)
        self._telemetry = [message for message in EXAMPLES if not isinstance(message, _CONTROL)]
        self._bodies = [wire.encode_body(message) for message in self._telemetry]
        self._plain: list[dict[str, Any]] = [msgspec.msgpack.decode(body) for body in self._bodies]

    def telemetry(self) -> Iterator[list[bytes]]:
        """Give what may come in where ranks speak, and in the stream that apps read."""
        while True:
            yield self._envelope(self._body(self._bodies, self._plain))

    def control(self) -> Iterator[list[bytes]]:
        """Give what may come in where apps command; nothing whole in it ends anything."""
        while True:
            command = {"type": "command", "id": self._text(), "verb": self._pick(_VERBS), "args": self._arguments()}
            yield self._envelope(self._one(command))

    def queries(self) -> Iterator[list[bytes]]:
        """Give what may come in where apps ask for history."""
        while True:
            query = {"type": "query", "id": self._text(), "name": self._pick(_QUERIES), "args": self._arguments()}
            yield self._envelope(self._one(query))

    def body(self) -> bytes:
        return self._body(self._bodies, self._plain)

    def value(self, depth: int = 0) -> Any:
        kind = self._random.randrange(9 if depth < 3 else 6)
        if kind < 3:
            return self._pick(_NUMBERS)
        if kind == 3:
            return self._text()
        if kind == 4:
            return self._random.randbytes(self._random.randrange(20))
        if kind == 5:
            return self._pick((None, True, False))
        if kind == 6:
            return [self.value(depth + 1) for _ in range(self._random.randrange(4))]
        return {self._text(): self.value(depth + 1) for _ in range(self._random.randrange(4))}

    def _pick(self, choices: Any) -> Any:
        return choices[self._random.randrange(len(choices))]

    def _text(self) -> str:
        kind = self._random.randrange(10)
        if kind == 0:
            return HOSTILE
        if kind == 1:
            return "x" * self._random.randrange(5_000)
        return "".join(chr(self._random.randrange(1, 0xD7FF)) for _ in range(self._random.randrange(6)))

    def _arguments(self) -> dict[str, Any]:
        return {self._pick(_ARGUMENTS): self.value() for _ in range(self._random.randrange(4))}

    def _one(self, message: dict[str, Any]) -> bytes:
        body = msgspec.msgpack.encode(message)
        return body if self._random.random() < 0.6 else self._break(body)

    def _body(self, bodies: list[bytes], plain: list[dict[str, Any]]) -> bytes:
        draw = self._random.random()
        if draw < 0.10:
            return self._pick(bodies)
        if draw < 0.40:
            fields = dict(self._pick(plain))
            names = list(fields)
            for _ in range(1 + self._random.randrange(3)):
                name = self._pick(names)
                fields[name] = self._near(fields[name]) if self._random.random() < 0.5 else self.value()
            return msgspec.msgpack.encode(fields)
        return self._break(self._pick(bodies))

    def _near(self, value: Any) -> Any:
        """Change a value into another one of its type."""
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return self._random.randrange(-2, 40) if self._random.random() < 0.7 else self._pick(_NUMBERS[:11])
        if isinstance(value, float):
            return self._pick(_NUMBERS)
        return self._text() if isinstance(value, str) else value

    def _break(self, body: bytes) -> bytes:
        draw, chance = self._random.random(), self._random
        if draw < 0.45:
            broken = bytearray(body)
            for _ in range(1 + chance.randrange(8)):
                broken[chance.randrange(len(broken))] = chance.randrange(256)
            return bytes(broken)
        if draw < 0.65:
            return body[: chance.randrange(len(body))]
        if draw < 0.80:
            other = self._pick(self._bodies)
            return body[: chance.randrange(len(body))] + other[chance.randrange(len(other)) :]
        if draw < 0.95:
            return chance.randbytes(chance.randrange(200))
        if draw < 0.998:
            return chance.choice((b"\x91", b"\x81\xa1a", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xd9")) * (
                1 + chance.randrange(4_000)
            )
        return self._pick((b"\x91", b"\x81\xa4type", b"\xa1x", b"\xc1")) * chance.randrange(1 << 20 // 5)

    def _envelope(self, body: bytes) -> list[bytes]:
        chance = self._random
        draw = chance.random()
        if draw < 0.02:
            return [chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 6))]
        # The examples speak for rank 3; a sender that speaks for another is refused.
        rank = 3 if draw < 0.7 else chance.randrange(8) if draw < 0.95 else chance.randrange(10**9)
        source = f"rank-{rank}-{1000 + rank}-{5000 + rank}" if draw < 0.97 else self._text()
        sequence = next(self._sequence) if draw < 0.98 else self._pick(_NUMBERS[:10])
        t = 1.78e9 if draw < 0.98 else self._pick(_NUMBERS)
        header: dict[str, Any] = {"v": [1, 0], "src": source, "seq": sequence, "t": t}
        if 0.985 < draw < 0.99:
            header["v"] = [2, 0]
        elif draw > 0.99:
            header[self._pick(list(header))] = self.value()
        return [msgspec.msgpack.encode(header), body]


def examples() -> list[Message]:
    """Give one message of every kind that a stream may hold, every text in it hostile."""
    return [with_hostile_text(message) for message in EXAMPLES if not isinstance(message, Command | Query | Answer)]
