import subprocess
import sys
import textwrap

from ftmon.trainer.probe.commands import agree_on_step

CODE = """
import torch, torch.distributed as dist
from ftmon.trainer.probe import active, collectives
collectives.install()
collectives.install()
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
counts = active.counts
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
print("counted")
"""


def test_each_collective_counts_once_by_group_and_size_and_is_named_while_it_runs():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "counted\n", done.stderr


def test_ranks_agree_on_the_step_to_stop_after(tmp_path):
    first = agree_on_step(tmp_path / "stop-after", 40, 0.1)
    second = agree_on_step(tmp_path / "stop-after", 42, 0.2)
    assert first == second == 53
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stop-after"]
