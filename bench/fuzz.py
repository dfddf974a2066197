"""Broken frames against a real hub and a real app: ``python bench/fuzz.py [--frames 1000000] [--seed 1] [--only hub]``.

The hub is the real process, of a run whose launcher lives; frames come in on all four channels that it reads. The app
is the real one, headless at 120x40 in a process of its own, attached to a hub that publishes broken frames and answers
one query in twenty with a broken answer. Asked each time: does it live to the end, does it answer (a hub's ping, an
app's event loop), does its memory grow in the second half, and does the recording open?
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

CHANNELS = ("telemetry", "ranks", "control", "query")
SHARES = {"telemetry": 0.90, "ranks": 0.02, "control": 0.04, "query": 0.04}
WARM_UP = 0.5
PING_SECONDS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="against each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("hub", "app"))
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--attach", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.attach:
        asyncio.run(attached(json.loads(args.attach)))
        return 0
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="ftmon-fuzz-") as home:
        os.environ["FTMON_HOME"] = home
        if args.only != "app":
            found["hub"] = against_hub(args.frames, args.seed)
        if args.only != "hub":
            found["app"] = against_app(args.frames, args.seed)
    print("| | frames | seconds | lived | slowest answer | memory half way | at the end | |")
    print("| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |")
    for name, row in found.items():
        print(
            f"| {name} | {row['frames']:,} | {row['seconds']:.0f} | {'yes' if row['lived'] else 'NO'} "
            f"| {row['slowest_s']:.2f} s | {row['warm_mb']:.0f} MB | {row['end_mb']:.0f} MB | {row['note']} |"
        )
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    return 0 if all(row["good"] for row in found.values()) else 1


def megabytes(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


# The hub.


def against_hub(count: int, seed: int) -> dict[str, Any]:
    import msgspec
    from ftmon.protocol.host.process import this_process
    from ftmon.protocol.link.sockets import peer_socket
    from ftmon.protocol.recording.reader import Reader
    from ftmon.protocol.run import rundir
    from hostile import Frames

    run = rundir.create("fuzz", ["true"], "run")
    run.write_run(msgspec.structs.replace(run.read_run(), launcher=this_process()))
    log = (run.logs / "hub.log").open("wb")
    hub = subprocess.Popen([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], stderr=log)
    while run.living_hub() is None and hub.poll() is None:
        time.sleep(0.02)
    context: zmq.Context[Any] = zmq.Context()
    senders = {channel: peer_socket(context, channel, b"rank-0-1000-5000" if channel == "ranks" else None)
               for channel in CHANNELS}  # fmt: skip
    for channel, socket in senders.items():
        socket.connect(run.ipc_address(channel))
    frames = Frames(seed)
    sources = {
        "telemetry": frames.telemetry(), "ranks": frames.control(), "control": frames.control(),
        "query": frames.queries(),
    }  # fmt: skip
    order = Frames(seed + 1)._random.choices(CHANNELS, [SHARES[name] for name in CHANNELS], k=count)
    begun = pinged = time.monotonic()
    slowest, warm, sent, curve = 0.0, 0.0, 0, []
    for sent, channel in enumerate(order, 1):
        socket = senders[channel]
        while not socket.poll(1000, zmq.POLLOUT) and hub.poll() is None:
            pass
        if hub.poll() is not None:
            break
        socket.send_multipart(next(sources[channel]))
        if channel != "telemetry":
            drain(socket)
        now = time.monotonic()
        if now - pinged > PING_SECONDS or sent == count:
            pinged = now
            slowest = max(slowest, ping(context, run))
        if sent % max(1, count // 20) == 0:
            curve.append(round(megabytes(hub.pid), 1))
            if sent >= WARM_UP * count and not warm:
                warm = curve[-1]
    slowest = max(slowest, ping(context, run) if hub.poll() is None else 0.0)
    lived = hub.poll() is None
    end = megabytes(hub.pid) if lived else 0.0
    context.destroy(linger=0)
    hub.terminate()
    hub.wait(60)
    log.close()
    with Reader(run.recording) as reader:
        info = reader.info()
        states = len(reader.state_at(time.time() + 1))
        read = sum(len(part) for part in everything(reader))
    failures = (run.logs / "hub.log").read_text(errors="replace").count("Traceback")
    print(f"hub: memory {curve} MB; {failures} tracebacks in its log; recorded {read:,} ({info.missing})")
    note = f"recording opens ({read:,} messages, {states} in its last state); {failures} failures in its log"
    return {
        "frames": sent, "seconds": time.monotonic() - begun, "lived": lived, "slowest_s": slowest, "warm_mb": warm,
        "end_mb": end, "note": note, "good": lived and not failures and slowest < 5 and end < warm * 1.2 + 20,
        "log": (run.logs / "hub.log").read_text(errors="replace")[-4000:],
    }  # fmt: skip


def everything(reader: Any) -> Any:
    after = 0
    while part := reader.frames(after, 5000):
        after = part[-1].seq
        yield part


def drain(socket: "zmq.Socket[Any]") -> None:
    while socket.poll(0):
        socket.recv_multipart()


def ping(context: "zmq.Context[Any]", run: Any) -> float:
    """Ask the hub whether it lives; return how long it took, 60 s when it did not."""
    from ftmon.protocol.link.sockets import peer_socket
    from ftmon.protocol.messages import wire
    from ftmon.protocol.messages.control import Command

    socket = peer_socket(context, "control")
    begun = time.monotonic()
    try:
        socket.connect(run.ipc_address("control"))
        socket.send_multipart(wire.encode("fuzz", 1, time.time(), Command("p", "ping")))
        return time.monotonic() - begun if socket.poll(60_000) else 60.0
    finally:
        socket.close()


# The app.


def against_app(count: int, seed: int) -> dict[str, Any]:
    from ftmon.protocol.link import sockets
    from ftmon.protocol.recording.reader import Reader
    from hostile import Frames
    from scenes import recorded

    folder = Path(tempfile.mkdtemp(dir=os.environ["FTMON_HOME"]))
    reader = Reader(recorded(folder / "true.sqlite", 4))
    context: zmq.Context[Any] = zmq.Context()
    bound: dict[str, zmq.Socket[Any]] = {}
    for channel in ("stream", "control", "query"):
        # XPUB: it tells who subscribes, so that nothing is published to nobody.
        bound[channel] = context.socket(zmq.XPUB) if channel == "stream" else sockets.hub_socket(context, channel)
        bound[channel].bind(f"ipc://{folder}/{channel}.sock")
    bound["stream"].setsockopt(zmq.XPUB_NODROP, 1)
    bound["stream"].setsockopt(zmq.SNDHWM, 2_000)
    addresses = {channel: f"ipc://{folder}/{channel}.sock" for channel in sockets.CHANNELS}
    words = [sys.executable, str(Path(__file__).resolve()), "--attach", json.dumps(addresses)]
    app = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    ending = threading.Event()
    served = threading.Thread(target=serve, args=(bound, reader.path, Frames(seed + 2), ending), daemon=True)
    served.start()
    assert app.stdout is not None
    first = app.stdout.readline()
    frames = Frames(seed)
    begun = time.monotonic()
    warm, sent, curve = 0.0, 0, []
    number = reader.info().last_seq
    for sent in range(1, count + 1):
        number += 1
        # A broken header means to the app that this is no hub: it joins anew.
        envelope = [header(number), frames.body()] if sent % 20_000 else next(frames.telemetry())
        publish(bound["stream"], envelope, app)
        if app.poll() is not None:
            break
        if sent % max(1, count // 20) == 0:
            curve.append(round(megabytes(app.pid), 1))
            if sent >= WARM_UP * count and not warm:
                warm = curve[-1]
    time.sleep(2)
    lived = app.poll() is None
    end = megabytes(app.pid) if lived else 0.0
    ending.set()
    app.terminate()
    rest = app.stdout.read().splitlines()
    app.wait(60)
    served.join(5)
    for socket in bound.values():
        socket.close(linger=0)
    reader.close()
    told = json.loads(rest[-1]) if rest else {}
    print(f"app: {first.strip()}; memory {curve} MB; {told}")
    slowest = float(told.get("slowest_s", 60.0))
    note = f"{told.get('applied', 0):,} messages reached its state; {told.get('joins', 0)} times joined anew"
    return {
        "frames": sent, "seconds": time.monotonic() - begun, "lived": lived, "slowest_s": slowest, "warm_mb": warm,
        "end_mb": end, "note": note, "good": lived and slowest < 5 and end < warm * 1.2 + 20 and bool(told),
    }  # fmt: skip


def header(number: int) -> bytes:
    from ftmon.protocol.messages import wire

    return wire.encode_header("hub", number, time.time())


subscribers = 0


def publish(socket: "zmq.Socket[Any]", envelope: list[bytes], app: "subprocess.Popen[str]") -> None:
    """Publish once somebody listens, and has room."""
    global subscribers
    while app.poll() is None:
        if not subscribers or socket.poll(0):
            if socket.poll(100):
                subscribers += 1 if socket.recv()[:1] == b"\x01" else -1
            continue
        try:
            socket.send_multipart(envelope, zmq.NOBLOCK)
            return
        except zmq.Again:
            time.sleep(0.002)


def serve(bound: dict[str, Any], recording: Path, frames: Any, ending: threading.Event) -> None:
    """Answer what the app asks; truly until it has joined, then one answer in twenty is broken, or none of its own."""
    from ftmon.protocol.messages import wire
    from ftmon.protocol.messages.control import Answer, Query
    from ftmon.protocol.recording.reader import Reader
    from ftmon.protocol.recording.results import answer_query

    poller = zmq.Poller()
    for channel in ("control", "query"):
        poller.register(bound[channel], zmq.POLLIN)
    own = Reader(recording)
    asked = 0
    while not ending.is_set():
        for socket, _ in poller.poll(100):
            peer, _, body = socket.recv_multipart()
            query = wire.decode_body(body)
            if not isinstance(query, Query):
                continue
            true = answer_query(own, query.name, query.args)
            asked += 1
            answers = [Answer(query.id, True, data=true)]
            if asked > 40 and asked % 20 == 0:
                answers = [Answer(query.id, True, data=frames._break(true))]
            elif asked > 40 and asked % 20 == 10:
                answers = [Answer("of nobody", True, data=true), Answer(query.id, asked % 3 > 0, data=frames.body())]
            for answer in answers:
                with contextlib.suppress(zmq.ZMQError):
                    socket.send_multipart([peer, *wire.encode("hub", 0, time.time(), answer)], zmq.NOBLOCK)
    own.close()


async def attached(addresses: dict[str, str]) -> None:
    """Run the app, headless, until told to end; note how long its loop stood still at the worst."""
    import signal

    from ftmon.tui.app import FtmonApp
    from ftmon.tui.source.live import LiveSource

    source = LiveSource(addresses=addresses)
    app = FtmonApp(source)
    ending = asyncio.Event()
    slowest = 0.0
    joins, state = 0, ""
    async with app.run_test(size=(120, 40)) as pilot:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
        deadline = time.monotonic() + 30
        while source.connection.state != "live" and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        print(source.connection.state, flush=True)
        keys = itertools.cycle(("enter", "escape", "a", "escape", "l", "escape", "down", "right", "question_mark"))
        turn = 0
        while not ending.is_set():
            begun = time.monotonic()
            await asyncio.sleep(0.05)
            slowest = max(slowest, time.monotonic() - begun - 0.05)
            turn += 1
            if source.connection.state != state:
                state = source.connection.state
                joins += state == "live"
            if turn % 40 == 0:
                await pilot.press(next(keys), "escape")
        applied = source.live_model.last_seq
    print(json.dumps({"slowest_s": round(slowest, 2), "applied": applied, "joins": joins}), flush=True)
    source.close()


if __name__ == "__main__":
    sys.exit(main())
