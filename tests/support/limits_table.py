"""The table of thresholds of docs/detectors.md; ``python tests/support/limits_table.py`` writes it anew."""

import sys
from pathlib import Path

from ftmon.protocol.analysis.kinds import KINDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "detectors.md"


def rewritten(text: str) -> str:
    before, heading, after = text.partition("## Limits")
    kept = [line for line in after.splitlines() if not line.startswith("|")]
    rows = [f"| `{kind.name}` | {what} | {limit} |" for kind in KINDS.values() for what, limit in kind.limits.items()]
    return before + "\n".join(
        [heading + "\n".join(kept).rstrip(), "", "| finding | threshold | value |", "| --- | --- | --- |", *rows, ""]
    )


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text()))
    sys.exit(0)
