"""Whether a process tree works: real processes that send, write, compute in a child, wake up, or do nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.analysis.stalls.evidence import Activity, Work
from ftmon.protocol.messages.telemetry import SelfDump
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.host import loop, processes
from ftmon.trainer.host.end.kill import Target
from ftmon.trainer.host.inspection import inspect
from ftmon.trainer.host.inspection.inspect import RANKS_AT_ONCE, DumpTarget, Inspection, inspect_ranks
from ftmon.trainer.host.processes import Origin, escaped, origin
from stall_bench import Bench

JUDGED_SECONDS = 0.7
BEGIN = "import os, socket, subprocess, sys, threading, time\n"
UPLOAD = """
def upload():
    listening = socket.socket(); listening.bind(("127.0.0.1", 0)); listening.listen(1)
    def serve():
        other, _ = listening.accept()
        while other.recv(65536): time.sleep(0.05)
    threading.Thread(target=serve, daemon=True).start()
    connection = socket.create_connection(listening.getsockname())
    while True: connection.sendall(bytes(65536))
"""
BY_THREAD = UPLOAD + "threading.Thread(target=upload, daemon=True).start()\nprint('up', flush=True)\nsys.stdin.read()"
CHILD = "subprocess.Popen([sys.executable, '-c', %r])\nprint('up', flush=True)\nsys.stdin.read()"
PIPE = "import os\na, b = os.pipe()\nwhile True: os.write(b, bytes(60000)); os.read(a, 60000)"


@contextlib.contextmanager
def running(script: str) -> Iterator[tuple["subprocess.Popen[bytes]", bytes]]:
    """A process that runs a script, with the first line that it wrote; it has nothing to read."""
    command = [sys.executable, "-c", BEGIN + script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process, process.stdout.readline()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "work"),
    [
        ("print('up', flush=True)\nsys.stdin.read()", ""),
        (BY_THREAD, "works"),
        (CHILD % (BEGIN + UPLOAD + "upload()"), "works"),
        (CHILD % PIPE, "works"),
        ("print('up', flush=True)\nwhile True: time.sleep(0.2)", "works"),
        ("print('up', flush=True)\nwhile True: pass", "computes"),
    ],
)
def test_what_a_process_tree_does_is_seen_from_outside(script: str, work: Work):
    with running(script) as (process, _):
        looks = [inspect.measure(process.pid, None, processes.table(), time.monotonic())]

        def seen() -> Work:
            looks.append(inspect.measure(process.pid, None, processes.table(), time.monotonic()))
            return looks[-1].work_since(looks[-2])

        # Between two looks the time passes that is judged. A child may still start in the first.
        eventually(
            lambda: seen() == work,
            f"work that is {work!r}",
            each=lambda: time.sleep(JUDGED_SECONDS),
            state=lambda: looks[-2:],
        )


def test_a_rank_started_by_another_does_not_work_for_that_one():
    child = "print(subprocess.Popen([sys.executable, '-c', 'while True: pass']).pid, flush=True)\nsys.stdin.read()"
    with running(child) as (process, line):
        other = int(line)
        ranks = [
            DumpTarget(rank, pid, processes.table()[pid].start_ticks, None)
            for rank, pid in ((0, process.pid), (1, other))
        ]
        eventually(lambda: inspect_ranks(ranks, ()).activities[1].cpu_seconds > 0.1, "rank 1 computes")
        seen = inspect_ranks(ranks, ()).activities
        assert (seen[0].processes, seen[0].below_seconds) == (1, 0.0), seen


def still(**changes: object) -> Activity:
    return Activity(10.0, "S", "", 5.0, 100, False, 50, 1.0, 2000, 3000, 3, 777)._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "work"),
    [
        ({}, ""), ({"chars": 12_000, "traffic": 6_000}, ""), ({"traffic": 20_000}, "works"),
        ({"chars": 60_000}, "works"), ({"io_bytes": 101}, "works"), ({"below_seconds": 1.5}, "works"),
        ({"newest": 778}, "works"), ({"processes": 2}, "works"), ({"switches": 51}, "works"),
        ({"cpu_seconds": 5.5}, "computes"), ({"on_disk": True}, "disk"), ({"worker_naps": 2}, "works"),
    ],
)  # fmt: skip
def test_keep_alives_are_no_work_and_everything_else_is(changes: dict[str, object], work: Work):
    assert still(time=12.0, **changes).work_since(still()) == work


def test_a_poll_of_the_dataloader_is_no_work():
    assert still(time=10.75, switches=52).work_since(still(), polls=True) == ""
    assert still(time=60.0, switches=70).work_since(still(), polls=True) == ""
    assert still(time=16.0, switches=59).work_since(still(), polls=True) == "works"


def test_a_process_blocked_on_a_file_lock_is_found_with_the_file_and_its_holder(tmp_path: Path):
    path = tmp_path / "cache.lock"
    script = "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,2); print('up',flush=True); time.sleep(600)"
    command = [sys.executable, "-c", script, str(path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"up\n"
    waiter = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        found = eventually(
            lambda: waiter.pid in (held := inspect.lock_waiters(processes.table())) and held, "the lock's waiter"
        )
        assert (found[waiter.pid].holder, found[waiter.pid].path) == (holder.pid, str(path))
        assert holder.pid not in found
    finally:
        for process in (waiter, holder):
            process.kill()
            process.wait()
        holder.stdout.close()


DAEMON = """
import os, sys, time
def daemon(run):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            run()
        os._exit(0)
    os.wait()
daemon(lambda: time.sleep(600))
os.environ["FTMON_RANK_PID"] = str(os.getpid())
another = "import time; print('up', flush=True); time.sleep(600)"
daemon(lambda: os.execv(sys.executable, [sys.executable, "-c", another]))
print("up", flush=True)
sys.stdin.read()
"""


def test_daemons_that_forked_twice_are_known_as_their_ranks_with_and_without_exec():
    ranks = [
        subprocess.Popen([sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in "ab"
    ]
    table: dict[int, processes.Process] = {}
    origins: list[Origin] = []
    found: dict[int, list[processes.Process]] = {}
    try:
        for process in ranks:
            for _ in "rank", "daemon":  # the daemon's after its exec, in which it has no environment in /proc
                assert process.stdout.readline() == b"up\n"

        def all_daemons() -> bool:
            nonlocal table, origins, found
            table = processes.table()
            origins = [one for rank, each in enumerate(ranks) if (one := origin(rank, each.pid, table)) is not None]
            found = escaped(origins, table)
            return {rank: len(daemons) for rank, daemons in found.items()} == {0: 2, 1: 2}

        eventually(all_daemons, "both daemons of both ranks")
        below = {each.pid for each in processes.descendants([process.pid for process in ranks], table)}
        assert not below & {daemon.pid for daemons in found.values() for daemon in daemons}
        assert {daemon.pid for daemon in escaped(origins[:1], table)[0]} == {daemon.pid for daemon in found[0]}
    finally:
        for daemon in (each for daemons in found.values() for each in daemons):
            processes.send_signal(daemon, signal.SIGKILL)
        for process in ranks:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                pipe.close()


RANK = """
import ctypes, faulthandler, gc, os, signal, sys, threading, time
gc.disable()  # a collection is native code that holds the GIL
path = sys.argv[1]
descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
faulthandler.register(signal.SIGRTMIN + 9, file=descriptor, all_threads=True, chain=False)
def probe():
    while True: time.sleep(0.1)
def python(depth):
    if depth: return python(depth - 1)
    for n in range(3):
        names = {}
        exec(f"def f{n}(): return {n}\\nf{n}()", names)
        names.clear()  # nothing is left to collect
def native_code():
    ctypes.PyDLL(None).sleep(600)
thread = threading.Thread(target=probe, daemon=True)
thread.start()
training = f"0x{threading.get_ident():016x}"
print(thread.native_id, descriptor, training, flush=True)
time.sleep(0.2)
while sys.argv[2] == "python": python(20)
if sys.argv[2] == "native": native_code()
time.sleep(600)
"""


def announced(process: "subprocess.Popen[str]", rank: int, path: Path) -> DumpTarget:
    """Return the target that a ``RANK`` announces on its standard output."""
    receiver, descriptor, thread = process.stdout.readline().split()
    dump = SelfDump(signal.SIGRTMIN + 9, int(receiver), int(descriptor), str(path), thread, process.pid)
    return DumpTarget(rank, process.pid, processes.table()[process.pid].start_ticks, dump)


@pytest.mark.parametrize(("does", "wrote"), [("native", True), ("python", False), ("sleep", False)])
def test_a_silent_rank_is_signalled_only_while_native_code_holds_pythons_lock(tmp_path: Path, does: str, wrote: bool):
    path = tmp_path / "stacks"
    with subprocess.Popen([sys.executable, "-c", RANK, path, does], stdout=subprocess.PIPE, text=True) as process:
        try:
            target = announced(process, 0, path)
            if wrote:
                eventually(lambda: "in native_code" in inspect_ranks([target], {0}).stacks.get(0, ""), "its stacks")
            else:

                def outside_the_kernel() -> Inspection | None:
                    seen = inspect_ranks([target], {0})
                    assert seen.stacks == {}
                    return None if "the kernel has to return first" in seen.why[0] else seen

                for _ in range(10):  # a signal would soon end a process that runs Python meanwhile
                    seen = eventually(outside_the_kernel, "a look at a thread that the kernel does not hold")
                    assert (seen.stacks, "does not wait for Python's lock" in seen.why[0]) == ({}, True)
                assert path.read_text() == ""
            assert process.poll() is None
        finally:
            process.kill()


def test_all_ranks_write_their_stacks_where_they_are_more_than_are_sampled_together(tmp_path: Path):
    paths = [tmp_path / str(rank) for rank in range(RANKS_AT_ONCE + 1)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, path, "native"], stdout=subprocess.PIPE, text=True)
        for path in paths
    ]
    try:
        targets = [announced(process, rank, paths[rank]) for rank, process in enumerate(ranks)]
        found: dict[int, str] = {}

        def have_all_written() -> bool:
            seen = inspect_ranks(targets, set(range(len(targets))) - found.keys()).stacks
            found.update({rank: text for rank, text in seen.items() if "in native_code" in text})  # not one cut short
            return len(found) == len(targets)

        eventually(have_all_written, "the stacks of all")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_that_py_spy_pauses_a_rank_is_no_work_of_it(run: RunDir, monkeypatch: Any) -> None:
    bench = Bench(run, monkeypatch)
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            process = processes.read(child.pid)
            eventually(lambda: "nanosleep" in inspect.wchan(child.pid, child.pid), "it sleeps")
            target = Target(0, child.pid, process.start_ticks)
            bench.parts.targets = lambda: [target]

            def observe() -> None:
                found = inspect.measure(child.pid, None, processes.table(), time.monotonic())
                bench.patch("_activity_of", lambda _: found)
                bench.look({})

            def is_in(state: str) -> bool:
                now = processes.read(child.pid)
                return now is not None and now.state == state

            def pause(process: processes.Process) -> tuple[str, str]:
                for _ in range(3):
                    os.kill(process.pid, signal.SIGSTOP)
                    eventually(lambda: is_in("T"), "it is stopped")
                    os.kill(process.pid, signal.SIGCONT)
                    eventually(lambda: is_in("S"), "it sleeps again")
                return "Process 1: native", ""

            monkeypatch.setattr("ftmon.trainer.host.inspection.inspect.native", pause)
            observe()
            before = inspect.switches(child.pid, child.pid)
            loop.start(bench.stall_probe.read_native([0], "why"))
            eventually(lambda: bench.emitted, "its stacks")
            assert inspect.switches(child.pid, child.pid) > before
            observe()
        finally:
            child.kill()
    assert bench.rank.evidence.work == ""
