"""Predictions, each in a fork of a process that has imported the libraries (``fork_server``).

A plan is a folder and a list of arguments of ``python -m ftmon.trainer.predict``; those that begin with ``live`` are a
run directory and a GPU of which the prediction beside a run is made. Prints a JSON object a line.
"""

import json
import os
import sys
import tempfile
from types import ModuleType
from typing import Any

import datasets  # noqa: F401  # before the fork
import msgspec
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.predict import answer, live, ranks, what_if  # noqa: F401  # before the fork
from ftmon.trainer.predict.__main__ import main

# NVML as on a host with GPUs, which DeepSpeed would ask for free memory.
nvml: Any = ModuleType("pynvml")
nvml.nvmlInit, nvml.NVMLError = lambda: None, Exception
sys.modules["pynvml"] = nvml
models = ("transformers.masking_utils", "transformers.models.llama.modeling_llama")
ranks.warm(("torch.nn.attention.varlen", *models, ranks.COMPILER))
del sys.modules["pynvml"]


def beside(folder: str, gpu: str) -> int:
    run = RunDir(folder)
    live._NEEDED_BYTES = 0  # whatever other tests leave of the host's memory
    print(msgspec.json.encode(live.made(run, run.config.read_text(), gpu)).decode())
    return 0


def one(words: list[str]) -> dict[str, object]:
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if not child:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            status = main(words) if words[0] != "live" else beside(words[1], words[2])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        lines = [line for line in output if not line.startswith("predicting: ")]
        return {"status": os.waitstatus_to_exitcode(status), "output": "".join(lines)}


def run(plan: dict[str, Any]) -> None:
    os.chdir(plan["folder"])
    for words in plan["commands"]:
        print(json.dumps(one(words)))
