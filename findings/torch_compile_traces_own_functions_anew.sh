#!/usr/bin/env bash
# PyTorch 2.13.0: torch.compile keeps compiled code on disk, so a second process finds a model's kernels there. But if the
# graph has an autograd function of one's own (torch.autograd.Function), AOTAutograd's cache is bypassed without a word:
# every process traces forward and backward, divides them and runs Inductor's passes again before it looks for the
# kernels. For one decoder layer of a language model that was 2.1 s of each start. With
# torch._functorch.config.autograd_cache_allow_custom_autograd_functions (or TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1)
# the graph is kept too. Needs a C++ compiler; the same was seen on a GPU with 2.11.
#
# Seen on x86-64 Linux, Python 3.11, 2026-12-01:
#   by default, process 1: aot hit 0 miss 0 bypass 1, kernels found 0
#   by default, process 2: aot hit 0 miss 0 bypass 1, kernels found 2
#   allowed, process 1: aot hit 0 miss 1 bypass 0, kernels found 2
#   allowed, process 2: aot hit 1 miss 0 bypass 0, kernels found 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cat > "$folder/run.py" <<'PYTHON'
import torch
from torch._dynamo.utils import counters


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values):
        return values * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


values = torch.ones(8, 8, requires_grad=True)
torch.compile(lambda x: (Double.apply(x) + 1).sin().sum())(values).backward()
aot = counters["aot_autograd"]
found = {name: aot[f"autograd_cache_{name}"] for name in ("hit", "miss", "bypass")}
print("aot", *(f"{name} {count}" for name, count in found.items()), end="")
print(f", kernels found {counters['inductor']['fxgraph_cache_hit']}")
PYTHON
export TORCHINDUCTOR_CACHE_DIR="$folder/cache"
python="$folder/venv/bin/python"
for process in 1 2; do echo "by default, process $process: $("$python" "$folder/run.py")"; done | tee "$folder/seen"
export TORCHINDUCTOR_AUTOGRAD_CACHE_ALLOW_CUSTOM_AUTOGRAD=1
for process in 1 2; do echo "allowed, process $process: $("$python" "$folder/run.py")"; done | tee -a "$folder/seen"
diff - "$folder/seen" <<'SEEN'
by default, process 1: aot hit 0 miss 0 bypass 1, kernels found 0
by default, process 2: aot hit 0 miss 0 bypass 1, kernels found 2
allowed, process 1: aot hit 0 miss 1 bypass 0, kernels found 2
allowed, process 2: aot hit 1 miss 0 bypass 0, kernels found 2
SEEN
