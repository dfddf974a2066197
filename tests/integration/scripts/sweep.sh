#!/usr/bin/env bash
# A driver script: python, port, script, a launcher. That launcher, then torchrun with a restart after a failed attempt.
"$1" -E "$4" 2 "$3" 6 32 ok
"$1" -m torch.distributed.run --nproc-per-node 2 --max-restarts 1 --master-port "$2" "$3" 5 16 once
