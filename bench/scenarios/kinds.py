"""The kinds of stall and death: what happens, to whom, and what has to be said of it.

``expect`` names what counts as the right verdict:

- ``stall``: a hang that names exactly the ranks at fault;
- ``tangle``: a hang in which every rank waits for the others: a mismatch or a deadlock is said, and nobody is named
  (or, where one rank took another branch, that one);
- ``sizes``: a collective that the library itself gives up, on whichever rank: that sizes differ is said, and no rank is
  called hung but the one with the odd size; the death of another is true, and ``cannot tell``;
- ``death`` and ``failure``: the rank that died, or whose exception it was, and how;
- ``slow``: the rank that is slow, and at what; no other is called slow;
- ``health``: the finding whose name is ``words`` is raised after the fault, of the culprit where it names ranks, and no
  other finding but disks' is;
- ``well``: no finding is raised at all (but disks'), nothing is called a hang, and the run finishes;
- ``exit``: a hang at exit, with the rank that lives on;
- ``honest``: nothing is called a hang and no rank slow, and the run finishes;
- ``resolves``: a hang may be called while it lasts, of that rank alone, and is said to be over;
- ``ended``: the run is said to have failed, and how;
- ``killed``: nothing is called a hang, the kill says that all is gone, and it is;
- ``cut``: the rank whose host is cut off is told as unreachable, what the others wait for is that host, and nobody is
  called hung; a kill says what it could not reach, ends the rest, and that too once the host is back.
"""

from dataclasses import dataclass
from typing import Literal

Expect = Literal[
    "stall",
    "tangle",
    "sizes",
    "death",
    "failure",
    "slow",
    "exit",
    "honest",
    "resolves",
    "ended",
    "killed",
    "cut",
    "health",
    "well",
]


@dataclass(frozen=True)
class Kind:
    """One kind; ``title`` says what happens."""

    name: str
    title: str
    expect: Expect
    ranks: int = 2
    engine: str = "torchrun"
    """Who starts the ranks, and what trains: ``torchrun`` with a plain loop; ``ddp`` or ``fsdp``: the same with a model
    in DDP, or sharded by ``fully_shard``; ``deepspeed`` with a ZeRO-2 engine; ``health`` and ``scaler``:
    ``health_ranks`` under DDP, the latter with a loss scaler."""
    limit_s: float = 25.0
    """How long after the fault a verdict is waited for; for honest kinds how long the run may go on."""
    culprit: bool = True
    """One rank is at fault, drawn by the seed."""
    words: str = ""
    """What the alert must say too, in title, text or evidence."""
    steps: int = 100_000
    """Steps the script trains where nothing stops it."""
    cuda: bool = False
    """Worth a run under NCCL too."""
    needs: str = ""
    """What the machine must allow: ``cgroup``, ``netns`` or ``tmpfs``."""
    at: int = 0
    """Step of the fault; 0: drawn by the seed."""
    ends: bool = False
    """The run is started with ``--on-hang kill --hang-grace 5``, which has to end it (an honest one: must not)."""


def _hang(name: str, title: str, expect: Expect, words: str, engine: str = "zero2") -> Kind:
    return Kind(name, f"DeepSpeed: {title}", expect, 2, engine, words=words, cuda=True, ends=True)


def _honest(name: str, title: str, limit_s: float, *, at: int = 60, steps: int = 80) -> Kind:
    return Kind(name, f"DeepSpeed: {title}", "honest", 2, "zero2", limit_s, at=at, steps=steps, cuda=True, ends=True)


KINDS = (
    Kind("sleep-before-collective", "sleeps before a collective", "stall", cuda=True),
    Kind("sleep-of-four", "one of four sleeps before a collective", "stall", ranks=4),
    Kind("device-wait", "sleeps before a collective; the others wait for it in no call, as for a device", "stall", 4),
    Kind("device-wait-gil", "the same, in native code and holding the GIL", "stall", ranks=4),
    Kind("device-wait-mute", "the same, and neither it nor its stacks can be had", "stall", ranks=4),
    Kind("sleep-in-loader", "sleeps in its data set", "stall", cuda=True),
    Kind("loader-worker", "its dataloader worker hangs", "stall"),
    Kind("dead-disk", "reads a file that never answers", "stall"),
    Kind("busy-python", "spins in Python", "stall", cuda=True),
    Kind("native", "sits in native code, the GIL released", "stall"),
    Kind("native-gil", "sits in native code and holds the GIL", "stall", cuda=True),
    Kind("lock", "waits for a lock nobody releases", "stall"),
    Kind("forked-child", "waits for a child it forked into another session", "stall"),
    Kind("deepspeed-sleep", "DeepSpeed ZeRO-2: sleeps before backward", "stall", engine="deepspeed"),
    Kind("deepspeed-loader", "DeepSpeed ZeRO-2: sleeps in its data set", "stall", engine="deepspeed"),
    Kind("subgroup", "missing from a collective of its own pair, of four ranks", "stall", ranks=4),
    Kind("checkpoint-hang", "hangs while it writes a checkpoint", "stall"),
    Kind("checkpoint-hang-gil", "hangs in opening a checkpoint's file, holding the GIL", "stall"),
    Kind("two-groups", "two groups entered in opposite order", "tangle", culprit=False),
    Kind("ring-of-groups", "three ranks, three pairs, each waits for the next", "tangle", ranks=3, culprit=False),
    Kind("other-collective", "enters another collective than the rest", "tangle", ranks=3),
    Kind("other-shape", "enters a collective with another shape", "sizes"),
    Kind("uneven-batches", "runs out of batches and goes to the final barrier", "tangle"),
    Kind("recv-without-send", "waits to receive what nobody sends", "tangle"),
    Kind("no-sync-one", "DDP: runs inside no_sync() from a step on", "stall", cuda=True),
    Kind("asleep-first-step", "sleeps in its first step", "stall"),
    Kind("flock-first-step", "waits for a file lock before its first step", "stall"),
    Kind("build-lock", "all wait for an extension's build lock, and nobody builds", "tangle", culprit=False),
    Kind("uneven-exit", "DDP: its script ends a step early", "failure", words="ended early"),
    Kind("sigstop", "stopped by SIGSTOP", "stall", cuda=True),
    Kind("deepspeed-sigstop", "DeepSpeed ZeRO-2: stopped by SIGSTOP", "stall", engine="deepspeed"),
    Kind("sigkill", "killed by SIGKILL", "death", words="SIGKILL", cuda=True),
    Kind("sigsegv", "reads address 0", "death", words="SIGSEGV"),
    Kind("abort", "aborts in native code", "death", words="SIGABRT"),
    Kind("exit-3", "leaves by os._exit(3)", "death", words="exit code 3"),
    Kind("kernel-oom", "killed by the kernel: out of memory", "death", words="SIGKILL", needs="cgroup"),
    Kind("exception", "raises an exception", "failure", words="the script gives up", cuda=True),
    Kind("deepspeed-exception", "DeepSpeed ZeRO-2: raises an exception", "failure", 2, "deepspeed", words="gives up"),
    Kind("recursion", "recurses without end", "failure", words="RecursionError"),
    Kind("launcher-killed", "the launcher is killed by SIGKILL", "ended", culprit=False, words="SIGKILL"),
    Kind("exit-hang", "lives on after the others finished", "exit", limit_s=45.0, steps=30, cuda=True),
    Kind("straggler", "computes four times as long as the others", "slow", words="slow at forward", cuda=True),
    Kind("slow-disk", "its disk answers slowly", "slow", words="slow at data", cuda=True),
    Kind("ddp-idle", "DDP: sleeps after each update", "slow", 2, "ddp", words="between phases", cuda=True),
    Kind("ddp-forward", "DDP: sleeps in each forward", "slow", 2, "ddp", words="slow at forward", cuda=True),
    Kind("ddp-data", "DDP: its disk answers slowly", "slow", 2, "ddp", words="slow at data", cuda=True),
    Kind("ddp-outside", "DDP: computes in Python outside any phase", "slow", 3, "ddp", words="ween phases", cuda=True),
    Kind("ddp-paused", "DDP: stopped for 120 of every 160 ms from outside", "slow", 2, "ddp"),
    Kind("fsdp-idle", "FSDP2: sleeps after each update", "slow", 2, "fsdp", words="between phases"),
    Kind("fsdp-forward", "FSDP2: sleeps in each forward", "slow", 2, "fsdp", words="slow at forward"),
    Kind("deepspeed-idle", "DeepSpeed ZeRO-2: sleeps after each update", "slow", 2, "deepspeed", words="ween phases"),
    Kind("deepspeed-generator", "DeepSpeed ZeRO-2: slow generator", "slow", 2, "deepspeed", words="ween phases"),
    Kind("network-cut", "the network between two hosts is cut", "cut", needs="netns"),
    Kind("network-cut-hub", "the network between two hosts is cut, and the hub killed", "cut", needs="netns"),
    Kind("pause-and-resume", "stopped for 4 s, then goes on", "resolves", steps=100),
    Kind("stall-that-ends", "its data set answers after 14 s", "resolves", steps=40),
    Kind("long-evaluation", "evaluates for 14 s while the others wait", "honest", steps=40),
    Kind("deepspeed-evaluation", "DeepSpeed ZeRO-2: evaluates for 14 s", "honest", engine="deepspeed", steps=40),
    Kind("long-checkpoint", "writes a checkpoint for 14 s while the others wait", "honest", steps=40),
    Kind(
        "honest-upload-child",
        "a child of it uploads for 24 s while the others wait",
        "honest",
        3,
        limit_s=60.0,
        steps=40,
    ),
    Kind(
        "honest-upload-thread",
        "a thread of it uploads for 24 s while the others wait",
        "honest",
        limit_s=60.0,
        steps=40,
    ),
    Kind("honest-eval-module", "DDP: evaluates model.module for 70 s", "honest", steps=40, limit_s=100.0, cuda=True),
    Kind("sleeping-retry", "tries again every 3 s, for 18 s, while the others wait", "honest", steps=40),
    Kind("long-first-step", "computes 14 s in its first step", "honest", steps=15, cuda=True),
    Kind("long-batch", "fetches one batch for 6 s", "honest", steps=40),
    Kind("long-step", "every rank computes one step for 6 s", "honest", steps=40, culprit=False),
    Kind("ddp-irregular", "DDP: each rank draws its steps' lengths", "honest", 2, "ddp", 90.0, steps=60, cuda=True),
    Kind("ddp-uneven", "DDP: twice as many micro-steps", "honest", 2, "ddp", 60.0, steps=100, cuda=True),
    Kind("ddp-evaluation", "DDP: evaluates alone every fifth step", "honest", 2, "ddp", 60.0, steps=80, cuda=True),
    Kind("ddp-nothing", "DDP: trains and finishes", "honest", 2, "ddp", 60.0, False, steps=150, cuda=True),
    Kind("kill", "is killed on request while it trains", "killed", culprit=False, cuda=True),
    Kind("kill-hung", "is killed on request while a rank holds the GIL in native code", "killed", cuda=True),
    Kind("nan-loss", "its loss becomes NaN", "health", words="nan_loss", engine="health"),
    Kind(
        "diverging-loss", "the loss rises and stays", "health", culprit=False, words="diverging_loss", engine="health"
    ),
    Kind(
        "grad-explosion",
        "the gradient norm is 100 times its usual size",
        "health",
        2,
        "health",
        culprit=False,
        words="gradient_explosion",
    ),
    Kind(
        "grad-collapse",
        "the gradient norm is a ten-thousandth of its usual size",
        "health",
        2,
        "health",
        culprit=False,
        words="gradient_collapse",
    ),
    Kind(
        "nan-gradient",
        "the gradient norm is NaN, the loss is not",
        "health",
        culprit=False,
        words="nan_gradient",
        engine="health",
    ),
    Kind(
        "loss-plateau",
        "the loss stops falling",
        "health",
        culprit=False,
        words="loss_plateau",
        engine="health",
        limit_s=60.0,
    ),
    Kind(
        "checkpoint-failed",
        "the disk is full when it writes a checkpoint",
        "health",
        culprit=False,
        words="checkpoint_failed",
        engine="health",
        needs="tmpfs",
    ),
    Kind(
        "scaler-skipping",
        "the loss scaler grows into an overflow every fourth step",
        "health",
        1,
        "scaler",
        culprit=False,
        words="scaler_skipping",
    ),
    Kind(
        "scaler-floor",
        "the loss scaler is at its floor and skips every update",
        "health",
        1,
        "scaler",
        culprit=False,
        words="scaler_floor",
    ),
    Kind(
        "input-bound",
        "batches take longer than steps on every rank",
        "health",
        culprit=False,
        words="input_bound",
        engine="health",
    ),
    Kind(
        "recompilation",
        "a compiled function sees a new shape at each step",
        "health",
        culprit=False,
        words="recompilation",
        engine="health",
    ),
    Kind(
        "disk-filling",
        "its output fills the disk",
        "health",
        culprit=False,
        words="disk_filling",
        engine="health",
        needs="tmpfs",
    ),
    Kind(
        "noisy-loss",
        "a noisy loss with spikes, and its restart of the learning rate",
        "well",
        2,
        "health",
        steps=400,
        culprit=False,
    ),
    Kind("scaler-search", "the loss scaler looks for its scale", "well", 1, "scaler", steps=300, culprit=False),
    Kind("slow-epochs", "the first batch of each epoch is slow", "well", 2, "health", steps=300, culprit=False),
    Kind("two-shapes", "a compiled function sees two shapes", "well", 2, "health", steps=300, culprit=False),
    Kind(
        "checkpoint-and-remove",
        "writes checkpoints and removes them",
        "well",
        2,
        "health",
        steps=300,
        culprit=False,
        needs="tmpfs",
    ),
    Kind("nothing", "trains and finishes", "honest", steps=60, culprit=False, cuda=True),
    _hang("save-one", "calls save_checkpoint alone", "tangle", "save_checkpoint"),
    _hang("left-loop", "leaves the loop early; a barrier follows", "tangle", "left the loop"),
    _hang("left-script", "leaves the loop early, and its script ends", "exit", "left the loop"),
    _hang("collective-if", "enters an all_reduce that the other does not", "tangle", "train.py:"),
    _hang("gather-one", "enters GatheredParameters alone", "tangle", "GatheredParameters", "zero3"),
    _hang("gather-unequal", "enters GatheredParameters once more", "tangle", "GatheredParameters", "zero3"),
    _hang("unequal-sizes", "all_reduce of another size", "tangle", "elements"),
    _hang("asleep-data", "sleeps in its data set", "stall", "data"),
    _hang("asleep-forward", "sleeps in its forward", "stall", "forward"),
    _hang("one-behind", "catches an exception and skips a backward", "tangle", "train.py:"),
    _hang("worker-hang", "its dataloader worker hangs", "stall", "dataloader"),
    _hang("stopped", "stopped by SIGSTOP", "stall", "stopped"),
    _honest("honest-checkpoint", "writes a checkpoint for 60 s", 90.0),
    _honest("honest-evaluation", "evaluates for 90 s", 120.0),
    _honest("honest-compilation", "compiles for 60 s in its first step", 90.0, at=1),
    _honest("honest-upload", "a thread of it uploads for 50 s", 80.0),
    _honest("honest-retries", "its data set retries for 45 s", 75.0),
    _honest("honest-irregular", "steps of 0.1 to 20 s", 200.0, at=8, steps=40),
    _honest("honest-generation", "generates for 60 s", 90.0),
    _honest("honest-run", "trains and finishes", 60.0, at=100, steps=300),
)
"""The last twenty are scenes of ``deepspeed_ranks.py``: the same faults and honest work, in steps of any length."""

BY_NAME = {kind.name: kind for kind in KINDS}
