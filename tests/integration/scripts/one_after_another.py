"""Scripts of ranks, one after the other in one process group: ``one_after_another.py NAME...``."""

import gc
import importlib
import sys

import torch

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for name in sys.argv[1:]:
        importlib.import_module(name).main()
        print("over", name, flush=True)
        gc.collect()
    torch.distributed.destroy_process_group()
