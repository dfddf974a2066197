"""1,024 simulated ranks of one run, two steps a second each, for a minute: is anything lost, and what does it cost?

    python bench/many_ranks.py [--ranks 1024] [--rate 2] [--seconds 60]

Each simulated rank has its own socket, its own numbering, a hello, its steps, and a heartbeat a second, as a real probe
sends them. The ranks' steps come in waves, as those of real ranks do: they finish a step within 50 ms of each other.
The hub is the real process; an app is attached.
"""

import argparse
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context

import zmq
from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.control import HubStats
from ftmon.protocol.messages.telemetry import Goodbye, Heartbeat
from ftmon.protocol.run import rundir
from hub_throughput import cpu_seconds, hello, step

SPREAD_SECONDS = 0.05


def simulate(run_path: str, ranks: list[int], world: int, rate: float, steps: int, go) -> None:
    address = rundir.RunDir(run_path).ipc_address("telemetry")
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    senders = {}
    for rank in ranks:
        socket = peer_socket(context, "telemetry")
        socket.connect(address)
        senders[rank] = [socket, f"rank-{rank}-{10_000 + rank}-1", 0]

    def send(rank, message):
        sender = senders[rank]
        sender[2] += 1
        sender[0].send_multipart(wire.encode(sender[1], sender[2], time.time(), message))

    for rank in ranks:
        send(rank, hello(rank, world))
    go.wait()
    begun = time.monotonic()
    for n in range(1, steps + 1):
        for i, rank in enumerate(random.sample(ranks, len(ranks))):
            due = begun + n / rate + SPREAD_SECONDS * i / len(ranks)
            while (wait := due - time.monotonic()) > 0.001:
                time.sleep(wait)
            send(rank, step(rank, n))
            if n % max(1, round(rate)) == 0:
                now = time.time()
                send(rank, Heartbeat(rank, n + 1, "forward", now, n * 8, now))
    for rank in ranks:
        send(rank, Goodbye(rank, time.time(), steps, "finished"))
    for sender in senders.values():
        sender[0].close(linger=30_000)
    context.term()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--senders", type=int, default=2, help="processes that simulate the ranks")
    arguments = parser.parse_args()
    steps = round(arguments.rate * arguments.seconds)
    expected = steps * arguments.ranks
    with tempfile.TemporaryDirectory() as home:
        os.environ["FTMON_HOME"] = home
        run = rundir.create("many", ["bench"], "watch")
        with (run.logs / "hub.log").open("wb") as log:
            hub = subprocess.Popen([sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)], stderr=log)
        while run.living_hub() is None:
            if hub.poll() is not None:
                raise SystemExit((run.logs / "hub.log").read_text())
            time.sleep(0.02)
        app_context = zmq.Context()
        app = peer_socket(app_context, "stream")
        app.connect(run.ipc_address("stream"))
        context = get_context("spawn")
        go = context.Event()
        shares = [list(range(n, arguments.ranks, arguments.senders)) for n in range(arguments.senders)]
        senders = [
            context.Process(
                target=simulate, args=(str(run.path), share, arguments.ranks, arguments.rate, steps, go), daemon=True
            )
            for share in shares
        ]
        for sender in senders:
            sender.start()
        time.sleep(8)
        cpu, wall = cpu_seconds(hub.pid), time.monotonic()
        go.set()
        seen, stats, cpu_end, wall_end = 0, None, 0.0, 0.0
        while seen < expected and app.poll(20_000):
            body = app.recv_multipart()[1]
            if b"\xa4step" in body[:20]:
                seen += 1
        cpu_end, wall_end = cpu_seconds(hub.pid), time.monotonic()
        deadline = time.monotonic() + 6
        while time.monotonic() < deadline and app.poll(3000):
            message = wire.decode_body(app.recv_multipart()[1])
            if isinstance(message, HubStats):
                stats = message
        for sender in senders:
            sender.join(60)
        hub.terminate()
        hub.wait(60)
        connection = sqlite3.connect(f"file:{run.recording}?mode=ro", uri=True)
        recorded = connection.execute("SELECT count(*) FROM steps").fetchone()[0]
        alerts = connection.execute("SELECT DISTINCT title FROM alerts").fetchall()
        connection.close()
        app_context.destroy(linger=0)
        sys.stderr.write((run.logs / "hub.log").read_text())
    assert stats is not None
    share = 100 * (cpu_end - cpu) / (wall_end - wall)
    print("| ranks | steps/s each | seconds | steps sent | recorded | at the app | lost | hub CPU |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {arguments.ranks:,} | {arguments.rate:g} | {wall_end - wall:.1f} | {expected:,} | {recorded:,} | {seen:,} "
        f"| {sum(stats.lost.values())} | {share:.1f} % |"
    )
    for (title,) in alerts[:5]:
        print(f"alert: {title}", file=sys.stderr)
    return 0 if recorded == seen == expected and not stats.lost else 1


if __name__ == "__main__":
    sys.exit(main())
