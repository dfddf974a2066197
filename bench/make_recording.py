"""Make a large realistic recording by the real Writer: ``python bench/make_recording.py FILE --rank-steps 1000000``.

Messages are those of ``tests/support/streams.py``. Making the messages takes most of the time; what the Writer itself
takes is printed apart.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from ftmon.protocol.messages.telemetry import Step
from ftmon.protocol.recording.writer import Writer
from streams import RUN, Stream


def make(path: Path, stream: Stream, commit_s: float = 0.5) -> dict[str, float]:
    """Write the stream, committing as often as a hub would; return what the Writer took."""
    path.unlink(missing_ok=True)
    writer = Writer(path, RUN)
    append_s = committed = 0.0
    commits: list[float] = []
    messages = steps = 0
    batch = []
    next_commit = stream.started + commit_s

    def flush() -> None:
        nonlocal append_s
        began = time.perf_counter()
        for frame in batch:
            writer.append(frame.seq, frame.t, frame.message)
        appended = time.perf_counter()
        writer.commit()
        commits.append(time.perf_counter() - appended)
        append_s += appended - began
        batch.clear()

    for frame in stream.frames():
        batch.append(frame)
        messages += 1
        steps += isinstance(frame.message, Step)
        if frame.t >= next_commit:
            flush()
            next_commit = frame.t + commit_s
    flush()
    began = time.perf_counter()
    writer.close()
    committed = time.perf_counter() - began
    assert not writer.error, writer.error
    commits.sort()
    return {
        "rank_steps": steps,
        "messages": messages,
        "bytes_per_rank_step": path.stat().st_size / steps,
        "append_us_per_message": append_s / messages * 1e6,
        "commit_us_per_message": sum(commits) / messages * 1e6,
        "commit_p50_ms": commits[len(commits) // 2] * 1e3,
        "commit_p99_ms": commits[int(len(commits) * 0.99)] * 1e3,
        "commit_max_ms": commits[-1] * 1e3,
        "close_s": committed,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rank-steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--cpu", action="store_true", help="gloo ranks on a CPU instead of CUDA ranks")
    parser.add_argument("--heartbeats", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    figures = make(
        options.file,
        Stream(
            ranks=options.ranks,
            steps=max(1, options.rank_steps // options.ranks),
            step_s=options.step_s,
            cuda=not options.cpu,
            heartbeats=options.heartbeats,
        ),
    )
    for name, figure in figures.items():
        print(f"{name:24} {figure:14,.1f}")
