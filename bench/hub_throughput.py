"""How many step messages a second the hub receives, records and republishes on one core, with an app attached.

    python bench/hub_throughput.py [--messages 200000] [--ranks 8]

The real hub process is pinned to one core with all its threads. Senders and a subscriber run on the others. Every
message is a full step of four phases with memory figures and tokens; each must arrive in the recording and at the
subscriber. Two rates: by the clock, and per second of CPU time the hub used (which other load on the machine does not
disturb).
"""

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context

import zmq
from ftmon.protocol.link.sockets import peer_socket
from ftmon.protocol.messages import wire
from ftmon.protocol.messages.telemetry import DeviceInfo, Hello, PhaseRecord, Span, Step
from ftmon.protocol.run import rundir

TICKS = os.sysconf("SC_CLK_TCK")


def hello(rank: int, world: int) -> Hello:
    device = DeviceInfo("cuda", rank, "simulated", 80 * 2**30)
    return Hello(rank, rank, world, "elsewhere", 10_000 + rank, 1, device, "cuda", time.time())


def step(rank: int, number: int) -> Step:
    gib = 2**30
    span = Span(10 * gib + number * 512, 12 * gib, 14 * gib + rank * 4096)
    phases = [
        PhaseRecord(
            name,
            i * 12_000,
            12_000 + (number * 7 + i) % 900,
            span,
            Span(15 * gib, 16 * gib, 16 * gib),
            device_us=11_800 + number % 300,
            active=span,
            requested=Span(span.start - 4096, span.end - 4096, span.peak - 4096),
            allocations=1200,
            frees=1190,
            allocated_bytes=9 * gib,
            collective_us=900,
            collectives=12,
        )
        for i, name in enumerate(("data", "forward", "backward", "optimizer"))
    ]
    return Step(
        rank=rank,
        step=number,
        started=time.time(),
        host_us=50_000 + number % 500,
        phases=phases,
        device_us=49_500,
        micro_steps=1,
        loss=2.0 + 1.0 / number,
        lr=1e-4,
        grad_norm=0.7,
        batch_shape=[4, 2048],
        samples=4,
        tokens=8000,
        padded_tokens=8192,
        probe_us=80,
    )


def send(run_path: str, ranks: list[int], world: int, each: int, cores: set[int], made, go, done) -> None:
    os.sched_setaffinity(0, cores)
    address = rundir.RunDir(run_path).ipc_address("telemetry")
    context = zmq.Context()
    sockets = {}
    for rank in ranks:
        socket = peer_socket(context, "telemetry")
        socket.connect(address)
        socket.send_multipart(wire.encode(f"rank-{rank}-{10_000 + rank}-1", 1, time.time(), hello(rank, world)))
        sockets[rank] = socket
    # Bodies are made beforehand: the sender must not be the bottleneck. A step's number that came before would begin
    # another training.
    bodies = {rank: [wire.encode_body(step(rank, n)) for n in range(1, each + 1)] for rank in ranks}
    made.set()
    go.wait()
    for n in range(each):
        for rank in ranks:
            sockets[rank].send(wire.encode_header(f"rank-{rank}-{10_000 + rank}-1", n + 2, time.time()), zmq.SNDMORE)
            sockets[rank].send(bodies[rank][n])
    # A socket that is closed while its connection takes nothing loses the last message, whatever its linger is.
    done.wait()
    context.destroy(linger=0)


def subscribe(run_path: str, expected: int, cores: set[int], ready, result) -> None:
    os.sched_setaffinity(0, cores)
    context = zmq.Context()
    socket = peer_socket(context, "stream")
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(rundir.RunDir(run_path).ipc_address("stream"))
    socket.recv_multipart()
    ready.set()
    count, first, last = 0, 0.0, 0.0
    while count < expected and socket.poll(20_000):
        frames = socket.recv_multipart()
        if b"\xa4step" in frames[1][:20]:
            count += 1
            last = time.monotonic()
            first = first or last
    result.put((count, first, last))


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    all_cores = os.sched_getaffinity(0)
    core = {min(all_cores)}
    others = (all_cores - core) or core
    each = arguments.messages // arguments.ranks
    total = each * arguments.ranks
    with tempfile.TemporaryDirectory() as home:
        os.environ["FTMON_HOME"] = home
        run = rundir.create("throughput", ["bench"], "watch")
        log = (run.logs / "hub.log").open("wb")
        hub = subprocess.Popen(
            [sys.executable, "-P", "-m", "ftmon.trainer.hub", str(run.path)],
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
        )
        while run.living_hub() is None:
            if hub.poll() is not None:
                raise SystemExit((run.logs / "hub.log").read_text())
            time.sleep(0.02)
        context = get_context("spawn")
        made, go, ready, done, result = *(context.Event() for _ in range(4)), context.Queue()
        app = context.Process(target=subscribe, args=(str(run.path), total, others, ready, result))
        app.start()
        ranks = list(range(arguments.ranks))
        sender = context.Process(target=send, args=(str(run.path), ranks, len(ranks), each, others, made, go, done))
        sender.start()
        assert ready.wait(30)
        assert made.wait(300)
        time.sleep(1)
        cpu = cpu_seconds(hub.pid)
        go.set()
        count, first, last = result.get(timeout=600)
        cpu = cpu_seconds(hub.pid) - cpu
        done.set()
        sender.join(60)
        app.join(60)
        time.sleep(1)
        connection = sqlite3.connect(f"file:{run.recording}?mode=ro", uri=True)
        recorded = connection.execute("SELECT count(*) FROM steps").fetchone()[0]
        connection.close()
        hub.terminate()
        hub.wait(30)
        size = run.recording.stat().st_size
        log.close()
        sys.stderr.write((run.logs / "hub.log").read_text())
    seconds = last - first
    print("| messages | recorded | at the app | seconds | per second | hub CPU s | per CPU second | bytes a step |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {total:,} | {recorded:,} | {count:,} | {seconds:.2f} | {total / seconds:,.0f} | {cpu:.2f} "
        f"| {total / cpu:,.0f} | {size / max(recorded, 1):.0f} |"
    )
    return 0 if recorded == count == total else 1


if __name__ == "__main__":
    sys.exit(main())
