#!/usr/bin/env bash
# A driver script: python, port, script. DeepSpeed's launcher, then torchrun with a restart after a failed attempt.
"$1" "$(dirname "$1")/deepspeed" --num_gpus 2 --master_port "$2" "$3" 6 32 ok
"$1" -m torch.distributed.run --nproc-per-node 2 --max-restarts 1 --master-port "$2" "$3" 5 16 once
