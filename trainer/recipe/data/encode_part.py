"""Encodes a part of the records: ``python -m ftmon.trainer.recipe.data.encode_part JOB``, started by rank 0."""

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ....protocol.errors import FtmonError
from ..config.load import load


def follow_parent(parent: int) -> None:
    """Make this process end soon after its parent, in any case."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(job: dict[str, Any]) -> int:
    """Write the documents of the job's records to its folder; return the exit status."""
    from ..model import tokenizer
    from . import pipeline
    from .encode import Encoder, write_part
    from .records import read_records

    folder = Path(job["folder"])
    config = load(str(folder / "config.yaml")).config
    own = not (config.tokenizer.name or config.model.name)
    made: Any = tokenizer.load(config, folder / "tokenizer" if own else None)
    records = read_records(config)
    encoder = Encoder(made, config, pipeline.record_formats(records, config))
    if pipeline.tokens_key(records, encoder, made) != job["key"]:
        print("the data or the tokenizer changed while they were read")
        return 1
    follow_parent(int(job["parent"]))
    part = Path(job["part"])
    done = part.with_suffix(".done")
    start, stop = int(job["start"]), int(job["stop"])
    write_part(encoder, records, start, stop, part, lambda count: done.write_text(str(count)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(json.loads(sys.argv[1])))
    except FtmonError as error:
        print(error)
        sys.exit(error.exit_status)
