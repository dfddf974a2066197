"""What the probe does that only a process of its own shows."""

import ctypes
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.run.environment import RANK_PID_ENV
from ftmon.trainer.host import processes
from ftmon.trainer.host.inspection import inspect
from ftmon.trainer.host.processes import INJECT_DIR as INJECT
from ftmon.trainer.launch.environment import executable_command

OVERLAPPING = """
import threading, types
from ftmon.trainer.probe import active
from ftmon.trainer.probe.hooks import distributed
counts, group = active.counts, types.SimpleNamespace(group_name="g")
entered, leave = threading.Event(), threading.Event()
class Tensor:
    def numel(self): return 1
def counted(function):
    call = distributed._counted(function.__name__, function)
    return lambda: call(Tensor(), group)
@counted
def other(tensor, group):
    entered.set()
    assert leave.wait(200)
@counted
def plain(tensor, group):
    pass
@counted
def first(tensor, group):
    thread.start()
    assert entered.wait(200)
    plain()
thread = threading.Thread(target=other)
first()
assert (counts.entered, counts.in_flight) == (2, "other"), (counts.entered, counts.in_flight)
leave.set()
thread.join(200)
plain()
assert (counts.entered, counts.in_flight) == (3, ""), (counts.entered, counts.in_flight)
class Interrupted:
    def numel(self): raise KeyboardInterrupt
try:
    distributed._counted("stopped", lambda tensor, group: None)(Interrupted(), group)
except KeyboardInterrupt:
    before = counts.entered
plain()
assert counts.entered == before + 1, "ctrl-c while a call was noted ended the counting"
"""


CODE = """
import torch, torch.distributed as dist
from ftmon.trainer.probe import active
from ftmon.trainer.probe.hooks import distributed
distributed.install_collectives()
distributed.install_collectives()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
start = counts.entered
dist.all_reduce(torch.ones(2))
assert counts.entered == start + 1, counts.entered
dist.all_gather_object([None], {"a": 1})  # gathers twice inside
assert counts.entered == start + 2, counts.entered
from torch.distributed.distributed_c10d import barrier
barrier()
assert (counts.entered, counts.last, counts.in_flight) == (start + 3, "barrier", "")
work = dist.broadcast(torch.ones(2), 0, async_op=True)
work.wait()
assert counts.last == "broadcast" and counts.in_flight == ""
try:
    dist.all_reduce("not a tensor")
except TypeError:
    pass
assert counts.in_flight == "" and counts.host_ns > 0
seen = list(counts.recent)
world, half = dist.group.WORLD.group_name, dist.new_group([0])
names = [name for _, _, name, _ in seen]
assert names == ["all_reduce", "all_gather_object", "barrier", "broadcast", "all_reduce"][:len(seen)], seen
assert [(group, number, size) for group, number, _, size in seen[:4]] == [
    (world, 1, 2), (world, 2, 0), (world, 3, 0), (world, 4, 2)
], seen
dist.all_reduce(torch.ones(7), group=half)
dist.all_reduce(torch.ones(5), dist.ReduceOp.SUM, half)
assert (counts.group, counts.sequence, counts.size) == (half.group_name, 2, 5)
dist.reduce_scatter_tensor(output=torch.ones(3), input=torch.ones(3))
assert (counts.group, counts.size) == (world, 3)
assert counts.groups[half.group_name] == 2
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
dist.barrier()
assert counts.groups == {dist.group.WORLD.group_name: 1}
"""

SCRIPTED = """
from ftmon.trainer.probe.hooks import torch as hooks
hooks.install(torch)
def forces(energy: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    found = torch.autograd.grad([energy], [places])[0]
    return torch.zeros_like(places) if found is None else -found
def backward(energy: torch.Tensor) -> None:
    torch.autograd.backward([energy])
places = torch.ones(3, requires_grad=True)
assert torch.jit.script(forces)((places * places).sum(), places).tolist() == [-2.0, -2.0, -2.0]
torch.jit.script(backward)(places.sum())
assert places.grad.tolist() == [1.0, 1.0, 1.0]
print("done")
"""


def test_each_collective_counts_once_and_is_named_while_it_runs_and_torchscript_compiles_what_hooks_replace(tmp_path):
    script = tmp_path / "scripted.py"  # TorchScript reads the source
    script.write_text(OVERLAPPING + CODE + SCRIPTED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout == "done\n", done.stderr


RUSAGE = """
import os, resource, sys
from ftmon.trainer.probe import active
from ftmon.trainer.probe.device.memory import CpuMemory
from ftmon.trainer.probe.device.memory import install, real_getrusage
install()
from resource import getrusage
children = real_getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # not 0 where importing torch starts a process
memory = CpuMemory()
block = bytearray(b"x") * (96 * 2**20)
memory.sample()
del block
for _ in range(3):
    memory.sample()
seen = getrusage(resource.RUSAGE_SELF)
assert type(seen) is resource.struct_rusage and len(seen) == 16
print(seen.ru_maxrss, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss == children, flush=True)
os.register_at_fork(after_in_child=active.leave_to_parent)
if os.fork() == 0:
    block = bytearray(b"x") * (64 * 2**20)
    del block  # the kernel has recorded this peak: what is resident now may be counted a little lower each time
    before, seen, after = (get(resource.RUSAGE_SELF).ru_maxrss for get in (real_getrusage, getrusage, real_getrusage))
    print(before <= seen <= after)
    sys.stdout.flush()
    os._exit(0)
os.wait()
"""


def test_the_script_s_peak_resident_size_never_falls_and_a_fork_has_its_own():
    output = subprocess.run([sys.executable, "-c", RUSAGE], capture_output=True, text=True, check=True, timeout=200)
    own, children, fork = output.stdout.split()
    assert int(own) > 96 * 1024
    assert (children, fork) == ("True", "True")


PROGRAMS = Path(sys.executable).parent


@pytest.mark.parametrize(
    "command",
    [
        executable_command([str(PROGRAMS / "deepspeed"), "train.py"], os.environ),
        [str(PROGRAMS / "torchrun"), "train.py"],
        [str(PROGRAMS / "accelerate"), "launch", "train.py"],
        [sys.executable, "-m", "torch.distributed.run", "train.py"],
        [sys.executable, "-m", "accelerate.commands.launch", "train.py"],
    ],
    ids=lambda command: " ".join(Path(word).name for word in command),
)
def test_a_launcher_started_from_inside_a_rank_is_refused_in_words_before_it_imports_anything(command, tmp_path):
    environment = {**os.environ, "FTMON_RUN": str(tmp_path), RANK_PID_ENV: str(os.getpid()), "PYTHONPATH": str(INJECT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("ftmon: refused: '"), done.stderr
    assert "was started from inside a rank" in done.stderr
    assert len(done.stderr.splitlines()) == 1


DUMPED = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from ftmon.trainer.probe.link.stacks import Dumper
dumper = Dumper(Path(sys.argv[1]), threading.main_thread().ident)
told, go = [], threading.Event()
def publish():
    told.append(dumper.install(threading.main_thread().ident))
    go.set()
    while True:
        time.sleep(0.02)
        if dumper.lost(threading.main_thread().ident):
            told.append(dumper.install(threading.main_thread().ident))
threading.Thread(target=publish, daemon=True).start()
go.wait(200)
def stuck():
    ctypes.PyDLL(None).usleep(600_000_000)
first = told[0]
if sys.argv[2] == "takes":
    hits = []
    signal.signal(first.signal, lambda *_: hits.append(1))
    while len(told) < 2: time.sleep(0.01)
    os.kill(os.getpid(), first.signal)
    assert hits == [1], hits
    first = told[1]
print(first.signal, first.receiver, first.descriptor, first.thread, first.training, flush=True)
stuck()
"""


@pytest.mark.parametrize("script", ["leaves the signal alone", "takes"])
def test_a_signal_to_one_thread_has_the_stacks_written_while_native_code_holds_the_lock(tmp_path, script):
    path = tmp_path / "stacks"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DUMPED), str(path), script], stdout=subprocess.PIPE, text=True
    )
    try:
        words = process.stdout.readline().split()
        number, receiver, descriptor = map(int, words[:3])
        assert os.readlink(f"/proc/{process.pid}/fd/{descriptor}") == str(path)
        assert int(words[4]) == process.pid
        libc: Any = ctypes.CDLL(None)
        found = lambda: path.exists() and "in stuck" in path.read_text()  # noqa: E731  # it may not be there yet

        def signalled() -> None:
            # Not while its main thread still runs Python, whose frames change while they are written.
            state = processes.table()[process.pid].state
            if state == "S" and inspect.wchan(process.pid, process.pid) in ("", "hrtimer_nanosleep"):
                libc.tgkill(process.pid, receiver, number)

        eventually(found, "the stacks", each=signalled, every=0.2)
        assert words[3] in path.read_text()
        assert process.poll() is None, "it lives on, and its native call was not interrupted"
    finally:
        process.kill()
        process.wait()
