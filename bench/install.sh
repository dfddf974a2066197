#!/bin/sh
# Installs ftmon's base package beside somebody's own torch and transformers, and runs an unchanged Trainer script in it.
#
#   bench/install.sh [-e VENV] [REQUIREMENT ...]     (default: torch transformers accelerate)
#
# Prints the size and time of `pip install ftmon`, fails if it changed or removed a package that was there, and prints what
# `ftmon run` recorded of the script. -e: an environment that has the packages already. A name ending in `=none` is
# installed without dependencies (torch==2.6.0=none: a CPU needs none of its CUDA wheels).
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
env=$work/env
if [ "${1:-}" = -e ]; then env=$2; shift 2; fi
[ -d "$env" ] || python3 -m venv "$env"
pip="$env/bin/python -m pip --disable-pip-version-check -q"
if [ $# -eq 0 ] && [ "$env" = "$work/env" ]; then set -- torch transformers accelerate; fi
plain=
for each in "$@"; do
    case $each in
        *=none) $pip install --no-deps "${each%=none}" ;;
        *) plain="$plain $each" ;;
    esac
done
# shellcheck disable=SC2086
[ -z "$plain" ] || $pip install $plain

$pip freeze | sort > "$work/before"
size() { du -sm "$env" | cut -f1; }
megabytes=$(size)
begun=$(date +%s.%N)
cp -r "$root" "$work/source"    # a build leaves files beside the source
$pip install --no-cache-dir "$work/source"
ended=$(date +%s.%N)
$pip freeze | grep -v '^ftmon ' | sort > "$work/after"
lost=$(comm -23 "$work/before" "$work/after")
[ -z "$lost" ] || { echo "changed or removed: $lost"; exit 1; }
echo "pip install ftmon: $(($(size) - megabytes)) MB, $(echo "$ended - $begun" | bc | cut -c1-5) s," \
    "$(comm -13 "$work/before" "$work/after" | wc -l) packages added, none changed"
"$env/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'

cat > "$work/train.py" <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 16))]
options = {"max_steps": 12, "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True, "save_strategy": "no"}
Trainer(LlamaForCausalLM(config), TrainingArguments("out", **options), train_dataset=rows).train()
PY
cd "$work"
export FTMON_HOME="$work/home" HF_HUB_OFFLINE=1
"$env/bin/ftmon" run -- "$env/bin/python" train.py > run.log 2>&1 || { tail -30 run.log; exit 1; }
"$env/bin/ftmon" status train --json | "$env/bin/python" -c '
import json, sys
found = json.load(sys.stdin)
step, loss = found["step"], found["loss"]
print(f"ftmon run: {step} steps, loss {loss:.3f}, state "  + found["state"])
sys.exit(step != 12)'
"$env/bin/ftmon" doctor | sed -n '/^training/,$p'
