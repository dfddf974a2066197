"""Converts every message except steps to a row of its table, and back."""

import sqlite3
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import ProtocolError, RecordingError
from ..messages.bounds import LAST_TIME
from ..messages.control import Alert
from ..messages.telemetry import DeviceSample, Hello, LogLine, ProcessMemory
from ..messages.wire import Frame, Message, decode_body, encode_body
from . import steprow, steprow_v1
from .guard import Guard

Row = tuple[Any, ...]

BODY_COLUMN = {"alerts": 13, "ranks": 11, "events": 4, "jobs": 18}
"""Index of the column with the whole message, by table. It is not always the last: later versions may add columns."""

NO_RANK = -1
"""``events.rank`` of a message without a rank."""

_COMPRESS_ABOVE = 512
_ZLIB_MAGIC = 0x78
_LARGEST = 8 * 2**20
"""Limit of an unpacked message in bytes. Its objects may need ten times as much memory."""

_MOST_LISTS = 200_000
"""Limit on the lists and maps of a message: an empty one is 1 byte, and its object takes about 100."""
_LISTS = bytes((*range(0x80, 0xA0), 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xDC, 0xDD, 0xDE, 0xDF))
"""First bytes of maps, lists and short extensions in msgpack; other values may contain these bytes too."""
_COUNTED_ABOVE = 64 * 2**10

_encode = msgspec.msgpack.Encoder().encode
_decode_processes = msgspec.msgpack.Decoder(list[int]).decode


def pack_body(message: Message) -> bytes:
    """Encode a whole message, compressed above ``_COMPRESS_ABOVE`` bytes.

    A msgpack map never begins with zlib's first byte, which therefore marks a compressed message.
    """
    body = encode_body(message)
    return zlib.compress(body, 6) if len(body) > _COMPRESS_ABOVE else body


UNBELIEVABLE = (
    RecordingError, ProtocolError, msgspec.MsgspecError, ArithmeticError, AttributeError, LookupError, TypeError,
    ValueError, RecursionError,
)  # fmt: skip
"""Errors of decoding a message from a row that ftmon did not write."""


def believed(message: Message) -> Message | None:
    """Return a message decoded from columns, after the checks of a message on the wire.

    Raises:
        ProtocolError: no sender could have sent it.
    """
    return decode_body(encode_body(message))


def unpack_body(body: bytes, charge: Callable[[int], None] | None = None) -> Message | None:
    """Decode the result of ``pack_body``; None for a type that a newer version added.

    Args:
        body: the bytes.
        charge: called with the unpacked size; it may raise to refuse it.

    Raises:
        RecordingError: it is damaged.
    """
    try:
        if body[:1] == bytes([_ZLIB_MAGIC]):
            inflater = zlib.decompressobj()
            body = inflater.decompress(body, _LARGEST)  # a few bytes of a hostile file may inflate to gigabytes
            if not inflater.eof:
                raise RecordingError("a message in the recording is cut off, or larger than any that is sent")
        if len(body) > _LARGEST:
            raise RecordingError("a message in the recording is larger than any that is sent")
        if len(body) > _COUNTED_ABOVE and len(body) - len(body.translate(None, _LISTS)) > _MOST_LISTS:
            raise RecordingError("a message in the recording has more lists than any that is sent")
        if charge is not None:
            charge(len(body))
        found = decode_body(body)
    except (zlib.error, TypeError, ProtocolError) as error:
        raise RecordingError(f"a damaged message in the recording: {error}") from None
    return found


def alert_row(seq: int, t: float, alert: Alert) -> Row:
    """Return a row of ``alerts``."""
    return (
        *(seq, t, alert.id, alert.kind, alert.severity, alert.time, alert.rank, alert.step, alert.phase),
        *(alert.title, alert.text, alert.resolved, alert.count, pack_body(alert)),
    )


def log_row(seq: int, t: float, line: LogLine) -> Row:
    """Return a row of ``logs``."""
    return (seq, t, line.rank, line.time, line.stream, line.text)


def log_from_row(row: Sequence[Any]) -> LogLine:
    """Return the log line of a row."""
    return LogLine(rank=row[2], time=row[3], stream=row[4], text=row[5])


def hello_row(seq: int, t: float, hello: Hello) -> Row:
    """Return a row of ``ranks``."""
    return (
        *(seq, t, hello.rank, hello.local_rank, hello.host, hello.pid, hello.device.name),
        *(hello.device.capacity_bytes, hello.memory_measure, hello.model, hello.zero_stage, pack_body(hello)),
    )


def event_row(seq: int, t: float, message: Message) -> Row:
    """Return a row of ``events``, the table for all types without their own table."""
    rank = getattr(message, "rank", None)
    return (seq, t, message.__struct_config__.tag, NO_RANK if rank is None else rank, pack_body(message))


class NameNumbers:
    """Numbers the devices and processes that device samples repeat, so that each is stored once.

    Args:
        first: the lowest number to assign.
    """

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._numbers: dict[Row, int] = {}

    def load(self, connection: sqlite3.Connection) -> None:
        """Load the names and numbers of an earlier writer of this file."""
        for table in ("device_names", "process_names"):
            for number, *key in connection.execute(f"SELECT * FROM {table}"):
                self._numbers[tuple(key)] = number
                self._next = max(self._next, number + 1)

    def sample_row(self, seq: int, t: float, sample: DeviceSample, note: Callable[[str, Row], None]) -> Row:
        """Return a row of ``device_samples``; ``note(table, row)`` is called for each new name."""
        key = (
            *(sample.host, sample.kind, sample.index, sample.name, sample.uuid),
            *(sample.total_bytes, sample.power_limit_w),
        )
        device = self._number("device_names", key, note)
        flat: list[int] = []
        for process in sample.processes:
            identity = (process.pid, process.rank, process.name)
            flat += (self._number("process_names", identity, note), process.used_bytes)
        return (
            *(seq, t, device, sample.time, sample.used_bytes, sample.utilization_percent, sample.power_w),
            *(sample.temperature_c, sample.sm_clock_mhz, sample.memory_clock_mhz),
            *("\n".join(sample.throttle_reasons) or None, _encode(flat) if flat else None),
        )

    def _number(self, table: str, key: Row, note: Callable[[str, Row], None]) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._next
            self._next += 1
            note(table, (number, *key))
        return number


def sample_from_row(row: Sequence[Any], device: Row, processes: dict[int, Row]) -> DeviceSample:
    """Return the device sample of a row, its device's row of ``device_names`` (without the number) and all processes.

    Raises:
        KeyError: a process is not among ``processes``.
    """
    host, kind, index, name, uuid, total_bytes, power_limit_w = device
    flat = _decode_processes(row[11]) if row[11] else []
    return DeviceSample(
        host=host,
        kind=kind,
        index=index,
        name=name,
        uuid=uuid,
        total_bytes=total_bytes,
        power_limit_w=power_limit_w,
        time=row[3],
        used_bytes=row[4],
        utilization_percent=row[5],
        power_w=row[6],
        temperature_c=row[7],
        sm_clock_mhz=row[8],
        memory_clock_mhz=row[9],
        throttle_reasons=row[10].split("\n") if row[10] else [],
        processes=[
            ProcessMemory(pid=pid, used_bytes=used, rank=rank, name=process)
            for number, used in zip(flat[::2], flat[1::2], strict=True)
            for pid, rank, process in [processes[number]]
        ],
    )


class RowDecoder:
    """Decodes rows of the stream's tables.

    Args:
        schema: the recording's schema.
        names: returns all rows of ``device_names`` or ``process_names``.
        guard: bounds the cost of unpacking.
    """

    def __init__(self, schema: int, names: Callable[[str], list[Row]], guard: Guard) -> None:
        self._step_from_row = (steprow_v1 if schema == 1 else steprow).step_from_row
        self._names = names
        self._guard = guard
        self._devices: dict[int, Row] = {}
        self._processes: dict[int, Row] = {}

    def frame(self, table: str, row: Row) -> Frame | None:
        """Return the frame of a row; None if it is damaged, or of a type that a newer version added."""
        seq, t = row[0], row[1]
        if seq.__class__ is not int or t.__class__ not in (float, int) or not 0 <= t < LAST_TIME:
            return None
        try:
            message = self._message(table, row)
        except UNBELIEVABLE:
            return None
        return None if message is None else Frame(seq, float(t), message)

    def _message(self, table: str, row: Row) -> Message | None:
        if table == "steps":
            return believed(self._step_from_row(row))
        if table == "device_samples":
            return believed(self._sample(row))
        if table == "logs":
            return believed(log_from_row(row))
        return self._guard.unpack(lambda: unpack_body(row[BODY_COLUMN[table]], self._guard.charge))

    def _sample(self, row: Row) -> DeviceSample:
        try:
            return sample_from_row(row, self._devices[row[2]], self._processes)
        except KeyError:
            self._devices = {number: tuple(rest) for number, *rest in self._names("device_names")}
            self._processes = {number: tuple(rest) for number, *rest in self._names("process_names")}
            return sample_from_row(row, self._devices[row[2]], self._processes)
