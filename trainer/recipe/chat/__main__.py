"""``python -m ftmon.trainer.recipe.chat MODEL|RUN``: see ``ftmon chat --help``."""

import argparse
import io
import logging
import os
import sys
import warnings

from ....protocol.errors import FtmonError, UsageError
from ....protocol.run import exits
from ....protocol.text import wrapped
from ..config.schema import MOST_SEED


def main() -> int:
    """Run the chat; return its exit status."""
    arguments = _parser().parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    warnings.filterwarnings("ignore")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from ..model.load import quiet_bitsandbytes  # the libraries read the environment when they are imported

    quiet_bitsandbytes()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # else bytes that are not UTF-8 raise in most locales
    try:
        _check_ranges(arguments)
        from .session import Session, find, load

        loaded = load(find(arguments.target), arguments.device)
        session = Session(loaded, arguments)
        return session.converse() if sys.stdin.isatty() else session.answer_lines()
    except FtmonError as error:
        print(wrapped(f"ftmon: {error}", 2), file=sys.stderr)
        return error.exit_status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return exits.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftmon chat", allow_abbrev=False)
    parser.add_argument("target")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--system", default="")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--stop", action="append", default=[])
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return parser


def _check_ranges(options: argparse.Namespace) -> None:
    if options.temperature is not None and not 0 <= options.temperature <= 100:
        raise UsageError(
            f"--temperature must be between 0 (always the likeliest token) and 100, not {options.temperature:g}"
        )
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise UsageError(f"--top-p must be above 0 and at most 1, not {options.top_p:g}")
    if not all(options.stop):
        raise UsageError("--stop needs the text that ends an answer")
    if options.max_tokens < 1:
        raise UsageError(f"--max-tokens must be 1 or more, not {options.max_tokens}")
    if options.seed is not None and not 0 <= options.seed <= MOST_SEED:
        raise UsageError(f"--seed must be a whole number from 0 to {MOST_SEED:,}, not {options.seed}")


if __name__ == "__main__":
    sys.exit(main())
