"""Checks training data: ``python -m ftmon.trainer.recipe.data_check CONFIG [key.sub=value ...]``.

Exit status: 0 nothing found, 1 findings, 2 wrong usage, or a configuration that no training would start with.
"""

import argparse
import os
import shutil
import sys

import msgspec

from ....protocol.errors import FtmonError, UsageError
from ....protocol.text import wrapped
from .. import hardware
from ..config.load import load
from ..preflight import resolve
from ..preflight.resolve import check_hub


def main(argv: list[str] | None = None) -> int:
    """Check the data of a configuration; return the exit status."""
    arguments = _parser().parse_args(argv)
    config: str = arguments.config
    overrides: list[str] = arguments.overrides
    try:
        missing = hardware.missing_packages()
        if missing:
            raise UsageError(f"this needs {', '.join(missing)}, not installed here; run: pip install 'ftmon[train]'")
        if "=" in config and not os.path.exists(config):
            loaded = load(None, [config, *overrides])
        else:
            loaded = load(config, overrides)
        check_hub(loaded)
        settled = resolve.settle_data(loaded)
        from .check import collect, judge

        collected = collect(settled, arguments.samples)
    except FtmonError as error:
        print(wrapped(f"ftmon: {error}", 2), file=sys.stderr)
        return 2
    findings = judge(collected.facts)
    if arguments.json:
        content = {**msgspec.to_builtins(collected.facts), "efficiency": collected.facts.efficiency}
        print(msgspec.json.encode({"findings": findings, "facts": content}).decode())
    else:
        from .show import Painter, render

        colour = (sys.stdout.isatty() and "NO_COLOR" not in os.environ) or arguments.color
        unicode = (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16")
        painter = Painter(colour, arguments.ascii or not unicode, shutil.get_terminal_size((100, 24)).columns)
        pad_to = settled.training.sequence_length * bool(settled.data.packing)
        print(render(collected, findings, painter, pad_to), end="")
    return 2 if collected.facts.problem else int(bool(findings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ftmon data check", description="show what the model will see of the data")
    parser.add_argument("config", metavar="CONFIG", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that win over the file's")
    parser.add_argument("--json", action="store_true", help="one JSON object for scripts")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="records to show")
    parser.add_argument("--color", action="store_true", help="colours also where the output is no terminal")
    parser.add_argument("--ascii", action="store_true", help="plain ASCII")
    return parser


if __name__ == "__main__":
    sys.exit(main())
