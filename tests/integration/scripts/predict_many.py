"""Runs several predictions, each in a fork of a process that has imported the libraries; prints a JSON array.

The argument is a JSON array of arguments of ``python -m ftmon.trainer.predict``; those that begin with ``live`` are a
run directory and a GPU of which the prediction beside a run is made.
"""

import json
import os
import sys
import tempfile

import msgspec
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.predict import live, ranks
from ftmon.trainer.predict.__main__ import main


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


if __name__ == "__main__":
    ranks.warm(("torch.nn.attention.varlen", "transformers.masking_utils", "transformers.models.llama.modeling_llama"))
    sys.stdout.write(json.dumps([one(words) for words in json.loads(sys.argv[1])]))
