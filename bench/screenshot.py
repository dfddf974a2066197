"""Pictures for README and the guide, made by the app itself: ``python bench/screenshot.py [RECORDING] [options]``.

Without a recording it plays one of four ranks made by ``tests/support/streams.py``, up to shortly after a spike; with
``--explained`` one whose memory is explained (``tests/support/peaks.py``, by peaks measured on H200s). ``--keys`` are
pressed before the picture is taken. The guide's are::

    python bench/screenshot.py
    python bench/screenshot.py --explained --size 110x34 --keys m --out docs/memory.svg
    python bench/screenshot.py --explained --size 110x34 --keys m,v,down --out docs/ranks.svg
    python bench/screenshot.py --explained --size 110x30 --keys e --out docs/events.svg
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 30.0
MADE_STEP = 302
SETTLE_SECONDS = 2.0
"""For the pooled past, which comes after what is in view."""


def made_recording(folder: Path) -> Path:
    """Record a stream of four ranks in mid-training."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from streams import Stream, write

    return write(folder / "recording.sqlite", Stream(ranks=4, steps=400, spike_every=24, finished=False).frames())


def explained_recording(folder: Path) -> Path:
    """Record four ranks whose memory is explained."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from peaks import explained

    return explained(folder / "recording.sqlite", 4, steps=160)


async def picture(recording: Path, columns: int, lines: int, step: int | None, keys: list[str]) -> str:
    """Play a recording through the real app, without a terminal, press keys, and return the screen as SVG."""
    from ftmon.tui.app import FtmonApp
    from ftmon.tui.source.replay import ReplaySource

    source = ReplaySource(recording, at_end=step is None)
    app = FtmonApp(source)
    async with app.run_test(size=(columns, lines)) as pilot:
        deadline = time.monotonic() + DEADLINE_SECONDS
        if step is not None:
            source.transport.goto(str(step))
        await pilot.pause(0.3)
        while (source.transport.seeking or not source.model.ranks) and time.monotonic() < deadline:
            await pilot.pause(0.1)
        await pilot.pause(SETTLE_SECONDS)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.5)
        svg = app.export_screenshot(title="ftmon")
    source.close()
    return svg


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", nargs="?", type=Path, metavar="RECORDING")
    parser.add_argument("--size", default="120x34", metavar="COLUMNSxLINES")
    parser.add_argument("--step", type=int, help="the step to show; default: the recording's end")
    parser.add_argument("--explained", action="store_true", help="a made run whose memory is explained")
    parser.add_argument("--keys", default="", metavar="KEY,KEY", help="keys to press first")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "overview.svg")
    arguments = parser.parse_args()
    columns, lines = map(int, arguments.size.split("x"))
    keys = [key for key in arguments.keys.split(",") if key]
    os.environ.update(COLORTERM="truecolor", TERM="xterm-256color")
    os.environ.pop("NO_COLOR", None)
    with tempfile.TemporaryDirectory() as folder:
        recording, step = arguments.recording, arguments.step
        if recording is None and arguments.explained:
            recording = explained_recording(Path(folder))
        elif recording is None:
            recording, step = made_recording(Path(folder)), step or MADE_STEP
        arguments.out.write_text(asyncio.run(picture(recording, columns, lines, step, keys)))
    print(arguments.out)


if __name__ == "__main__":
    main()
