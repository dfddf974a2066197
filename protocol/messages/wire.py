"""The envelope: two frames, a header and a body; and the counting of lost messages.

Frame 0 is a msgpack map ``{"v": [major, minor], "src": sender, "seq": number, "t": seconds}``; frame 1 is one message.
The hub republishes a body's bytes unchanged under its own header. Sequence numbers count from 1 for each sender.
"""

from typing import Any, get_args

import msgspec

from ..errors import ProtocolError, VersionError
from . import control, hosts, memory, telemetry
from .telemetry import Name, Sequence, Time

VERSION = (1, 0)
"""Major and minor version of the protocol. Another major is refused; a newer minor is read as far as known."""
RESTART_LEAP = 1 << 20  # a hub that replaces an earlier one skips this many numbers; a gap of that size is not a loss
Message = (
    telemetry.Hello | telemetry.Plan | telemetry.Step | telemetry.Heartbeat | telemetry.AllocatorEvents
    | telemetry.SnapshotTaken | telemetry.LogLine | telemetry.Oom | telemetry.Failure | telemetry.Stacks
    | telemetry.Goodbye | telemetry.DeviceSample | memory.Composition | memory.Cause | memory.OomReport
    | control.RankState | control.RunState | control.Alert | control.HubStats | control.Command
    | control.Accepted | control.Result | control.Query | control.Answer | hosts.AgentBeat | hosts.AgentAck
    | hosts.HostState | telemetry.Closing | telemetry.Compiles | telemetry.DiskSpace | telemetry.DeviceHealth
    | telemetry.Xid | hosts.Job | telemetry.Evaluation | telemetry.Checkpoint | telemetry.Activity
    | telemetry.CheckpointFailed | memory.Prediction | memory.StepTrace | telemetry.EarlyStop
    | telemetry.LostEdit
    | telemetry.StopAsked | control.ExporterState
)  # fmt: skip
"""Any message; its tag is in the map's ``type`` field."""
MESSAGE_TYPES: tuple[type[msgspec.Struct], ...] = get_args(Message)


class Header(msgspec.Struct, frozen=True):
    """Frame 0 of an envelope."""

    v: tuple[int, int]
    src: Name
    seq: Sequence
    t: Time


class Frame(msgspec.Struct, frozen=True):
    """A message of the hub's stream: its sequence number, the time when the hub received it, and the message."""

    seq: int
    t: float
    message: Message


UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""Errors of msgspec for untrusted bytes; for a string that is not UTF-8, Python raises ValueError."""
_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder: "msgspec.msgpack.Decoder[Message]" = msgspec.msgpack.Decoder(Message)


class _TagOnly(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_TagOnly)
KNOWN_TAGS = frozenset(str(struct.__struct_config__.tag) for struct in MESSAGE_TYPES)


def encode_header(src: str, seq: int, t: float) -> bytes:
    """Encode frame 0."""
    return _encoder.encode(Header(VERSION, src, seq, t))


def encode_body(message: Message) -> bytes:
    """Encode frame 1; halves of surrogate pairs, which come from bytes that are no UTF-8, become question marks."""
    try:
        return _encoder.encode(message)
    except UnicodeEncodeError:
        return _encoder.encode(_encodable(msgspec.to_builtins(message, builtin_types=(bytes,))))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(each) for key, each in value.items()}
    return [_encodable(each) for each in value] if isinstance(value, list | tuple) else value


def encode(src: str, seq: int, t: float, message: Message) -> list[bytes]:
    """Encode both frames of an envelope."""
    return [encode_header(src, seq, t), encode_body(message)]


def decode_header(frame: bytes) -> Header:
    """Decode frame 0; raise ``VersionError`` for another major version, ``ProtocolError`` for no header."""
    try:
        header = _header_decoder.decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(f"not an ftmon header: {error}") from None
    if header.v[0] != VERSION[0]:
        sender, (major, minor), ours = header.src or "a peer", header.v, f"{VERSION[0]}.{VERSION[1]}"
        spoken = f"{sender} speaks ftmon protocol {major}.{minor}, this side speaks {ours}"
        raise VersionError(sender, f"{spoken}: install the same ftmon version on both sides")
    return header


def decode_body(frame: bytes) -> Message | None:
    """Decode frame 1; return None for a type unknown to this version, raise ``ProtocolError`` for no valid message."""
    try:
        return _message_decoder.decode(frame)
    except UNREADABLE as error:
        reason = str(error)
    try:
        tag = _tag_decoder.decode(frame).type
    except UNREADABLE:
        raise ProtocolError(f"not an ftmon message: {reason}") from None
    if tag in KNOWN_TAGS:
        raise ProtocolError(f"a damaged ftmon message of type {tag!r}: {reason}")
    return None


def decode_answer(frames: list[bytes]) -> Message | None:
    """Decode the frames of a message received as an answer; None for a number other than two, or an unknown type."""
    if len(frames) != 2:
        return None
    decode_header(frames[0])
    return decode_body(frames[1])


def is_leap(gap: int) -> bool:
    """Return whether a gap in the numbering is due to a new hub, not to lost messages.

    The new hub counts from the last recorded number plus ``RESTART_LEAP``. Numbers that were assigned after that one
    (heartbeats, messages not yet written) make the gap smaller.
    """
    return gap >= RESTART_LEAP // 2


class LossCounter:
    """Counts the lost messages of each sender, from gaps in its numbering."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self.lost: dict[str, int] = {}

    @property
    def numbers(self) -> dict[str, int]:
        """Highest sequence number seen, by sender."""
        return {src: following - 1 for src, following in self._next.items()}

    def see(self, src: str, seq: int) -> int:
        """Record that message ``seq`` of ``src`` arrived; return the number of messages lost just before it.

        Counting starts at a sender's first message. A number below the expected one is a duplicate or a restarted
        sender, and a leap of ``RESTART_LEAP`` is a hub that replaced an earlier one: neither is a loss.
        """
        expected = self._next.get(src)
        self._next[src] = seq + 1
        if expected is None or seq <= expected:
            return 0
        gap = seq - expected
        if is_leap(gap):
            return 0
        self.lost[src] = self.lost.get(src, 0) + gap
        return gap
