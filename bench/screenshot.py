"""Pictures for README and the guide, made by the app itself: ``python bench/screenshot.py [RECORDING] [options]``.

Without a recording it plays one of four ranks made by ``tests/support/streams.py``, up to shortly after a spike; with
``--explained`` one whose memory is explained (``tests/support/peaks.py``, by peaks measured on H200s). ``--keys`` are
pressed before the picture is taken. The guide's are::

    python bench/screenshot.py
    python bench/screenshot.py --explained --size 110x34 --keys m --out docs/memory.svg
    python bench/screenshot.py --explained --size 110x34 --keys m,v,down --out docs/ranks.svg
    python bench/screenshot.py --explained --size 110x30 --keys e --out docs/events.svg
    python bench/screenshot.py --trained --size 110x34 --keys t,v,v,v,left,left,left --out docs/training-screen.svg
    python bench/screenshot.py --held --size 110x36 --out docs/oom.svg
    python bench/screenshot.py --held --size 110x24 --keys c --type "tensors(3)" --out docs/console.svg
    python bench/screenshot.py --snapshot --size 110x34 --out docs/snapshot.svg

``--held`` is of a rank that waits at an out-of-memory error (``tests/support/oomscenes.py``); what is typed into its
console is answered as a rank answers.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

from textual import events

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


def trained_recording(folder: Path) -> Path:
    """Record a training with evaluations and checkpoints."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from trainscenes import trained

    return trained(folder / "recording.sqlite")


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


async def held_picture(folder: Path, columns: int, lines: int, keys: list[str], typed: str) -> str:
    """Show a rank that is held at an out-of-memory error; ``typed`` goes into its console."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from ftmon.tui.app import FtmonApp
    from oomscenes import TENSORS, HeldRun

    source = HeldRun(folder / "llama3-guanaco")
    source.folder = None  # where this picture is made is nobody's business
    app = FtmonApp(source)
    async with app.run_test(size=(columns, lines)) as pilot:
        await pilot.pause(SETTLE_SECONDS)
        for key in keys:
            await pilot.press(key)
            await pilot.pause(0.5)
        if typed:
            app.screen.focused.post_message(events.Paste(typed))
            await pilot.press("enter")
            await pilot.pause(0.5)
            source.answer("0", TENSORS, place="/home/user/llama3/model.py:143 forward")
            await pilot.pause(0.5)
        return app.export_screenshot(title="ftmon")


async def snapshot_picture(columns: int, lines: int, keys: list[str]) -> str:
    """Explore the snapshot of a real step."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from ftmon.tui.screens.snapshot import SnapshotApp
    from phasesnapshot import step_with_phases

    app = SnapshotApp([step_with_phases()])
    async with app.run_test(size=(columns, lines)) as pilot:
        for key in keys:
            await pilot.press(key)
        await pilot.pause(0.5)
        return app.export_screenshot(title="ftmon snapshot")


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recording", nargs="?", type=Path, metavar="RECORDING")
    parser.add_argument("--size", default="120x34", metavar="COLUMNSxLINES")
    parser.add_argument("--step", type=int, help="the step to show; default: the recording's end")
    parser.add_argument("--explained", action="store_true", help="a made run whose memory is explained")
    parser.add_argument("--trained", action="store_true", help="a made run with evaluations and checkpoints")
    parser.add_argument("--held", action="store_true", help="a rank that is held at an out-of-memory error")
    parser.add_argument("--type", default="", help="with --held and the key c: what to type into the console")
    parser.add_argument("--snapshot", action="store_true", help="explore a memory snapshot")
    parser.add_argument("--keys", default="", metavar="KEY,KEY", help="keys to press first")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "overview.svg")
    arguments = parser.parse_args()
    columns, lines = map(int, arguments.size.split("x"))
    keys = [key for key in arguments.keys.split(",") if key]
    os.environ.update(COLORTERM="truecolor", TERM="xterm-256color")
    os.environ.pop("NO_COLOR", None)
    with tempfile.TemporaryDirectory() as folder:
        recording, step = arguments.recording, arguments.step
        if arguments.held or arguments.snapshot:
            made = (
                held_picture(Path(folder), columns, lines, keys, arguments.type)
                if arguments.held
                else snapshot_picture(columns, lines, keys)
            )
            arguments.out.write_text(asyncio.run(made))
            print(arguments.out)
            return
        if recording is None and arguments.explained:
            recording = explained_recording(Path(folder))
        elif recording is None and arguments.trained:
            recording = trained_recording(Path(folder))
        elif recording is None:
            recording, step = made_recording(Path(folder)), step or MADE_STEP
        arguments.out.write_text(asyncio.run(picture(recording, columns, lines, step, keys)))
    print(arguments.out)


if __name__ == "__main__":
    main()
