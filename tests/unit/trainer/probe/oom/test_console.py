"""A rank held in its failing frame: it waits, runs what it is asked in that frame, and goes on as without ftmon."""

import sys
import threading
from queue import Queue
from types import FrameType
from typing import Any

import pytest
import torch
from ftmon.protocol.run.rundir import RunOptions
from ftmon.trainer.probe.oom.console import OUTPUT_LIMIT, Console, Hold
from ftmon.trainer.probe.oom.report import frames_of, frames_to
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

HOLDS = {"on_oom": "hold", "allow_console": True}
CPU = torch.device("cpu")
SECONDS = 200.0
STARTED = threading.Event()


class Held:
    """A thread that is held in ``allocate``, called by ``train``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.hold = Hold(RunOptions(**options))
        self.answers: Queue[dict[str, Any]] = Queue()
        self.result: Any = None
        self.thread = threading.Thread(target=self._train)
        self.thread.start()
        while not self.hold.since and self.thread.is_alive():
            self.thread.join(0.005)

    def _train(self) -> None:
        batch = torch.zeros(256, 1024)
        self.result = self._allocate(batch, 3)

    def _allocate(self, batch: Any, count: int) -> Any:
        self.hold.wait(frames_to(sys._getframe()), 1024, CPU)
        return count if batch is None else (tuple(batch.shape), count)

    def run(self, code: str) -> dict[str, Any]:
        assert self.hold.run(code, lambda ok, text, data: self.answers.put(data)) == ""
        for _ in range(int(SECONDS / 0.005)):
            self.hold.tick()
            if not self.answers.empty():
                return self.answers.get()
            self.thread.join(0.005)
        raise AssertionError(f"no answer: {code}")

    def end(self) -> Any:
        self.hold.release()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.result


@pytest.fixture
def held() -> Any:
    one = Held(HOLDS)
    yield one
    one.end()


def test_a_held_thread_goes_on_once_it_is_released_which_interrupts_code_that_does_not_end():
    one = Held(HOLDS)
    assert one.hold.since > 0
    one.hold.wait([], 1, CPU)  # a second failure meanwhile is not held
    assert (one.end(), one.hold.since, one.hold.release()) == (((256, 1024), 3), 0.0, False)
    one = Held(HOLDS)
    one.hold.run("STARTED.set()\nwhile True: pass", lambda ok, text, data: one.answers.put(data))
    assert STARTED.wait(SECONDS)
    assert "still running" in one.hold.run("1", lambda *_: None)
    one.end()
    one.hold.tick()
    assert one.answers.get(timeout=SECONDS)["error"] == "interrupted"


@pytest.mark.parametrize("options", [{"on_oom": "hold", "hold_timeout": 0.05}, {}])
def test_it_lets_go_by_itself_after_its_time_and_waits_for_nothing_without_the_option(options: dict[str, Any]) -> None:
    one = Held(options)
    one.thread.join(SECONDS)
    assert one.result == ((256, 1024), 3)


def test_code_runs_in_the_held_thread_sees_the_failing_frame_and_assigns_in_it(held: Held) -> None:
    held.run("import threading")
    assert held.run("threading.get_ident()")["output"].strip() == str(held.thread.ident)
    assert held.run("tuple(batch.shape), count")["output"] == "((256, 1024), 3)\n"
    assert held.run("count = count + 4")["output"] == ""
    assert held.run("[count for _ in range(2)]")["output"] == "[7, 7]\n"
    assert held.end() == ((256, 1024), 7)


def test_freeing_a_name_gives_it_up_in_the_frame_itself_and_in_the_callers(held: Held) -> None:
    assert "None now" in held.run("free('batch')")["output"]
    held.run("up()")
    assert held.run("batch is None")["output"] == "True\n"
    held.run("down()")
    assert held.run("free('nothing')")["error"].startswith("NameError: this frame has no name 'nothing'")
    assert held.end() == 3


def test_own_code_is_found_below_the_libraries() -> None:
    frames: list[FrameType] = []

    class Layer(torch.nn.Module):
        def forward(self, value: Any) -> Any:
            frames.extend(frames_to(sys._getframe()))
            return value

    torch.nn.Sequential(Layer())(torch.zeros(1))
    console = Console([*frames[:-1]], 1, CPU)
    assert "module.py" in console.place
    assert "test_own_code" in console.run("own()")[0]


def test_tensors_are_listed_by_size_with_their_names(held: Held) -> None:
    with FunctionalTensorMode():
        traced: Any = FunctionalTensor.to_functional(torch.zeros(512, 1024))  # as torch.compile leaves them alive
    # Other tests may have left larger tensors in this process, and output is bounded.
    code = "print(*[line for line in str(tensors(10**9)).splitlines() if 'batch (_allocate)' in line])"
    line = held.run(code)["output"]
    assert traced.shape == (512, 1024)
    assert all(part in line for part in ("1.0 MiB", "(256, 1024)", "batch (_train)"))


def test_retrying_says_whether_it_fits_now_and_output_is_bounded(held: Held) -> None:
    assert "fit now" in held.run("retry()")["output"]
    console = Console(frames_to(sys._getframe()), 1 << 60, CPU)
    output, failed = console.run("retry()")
    assert "still does not fit" in output
    assert failed == ""
    output, _ = console.run("print('x' * 1_000_000)")
    assert OUTPUT_LIMIT <= len(output) < OUTPUT_LIMIT + 100
    assert output.endswith("(cut)")


def test_errors_are_text_and_up_and_down_move_along_the_stack(held):
    found = held.run("1 / 0")
    assert found["error"] == "ZeroDivisionError: division by zero"
    assert "<console>" in found["output"]
    assert held.run("1 +")["error"].startswith("SyntaxError")
    assert held.run("raise SystemExit")["error"].startswith("SystemExit")
    assert held.run("'alive'")["output"] == "'alive'\n"
    assert "_allocate" in held.run("frame")["output"]
    assert held.run("up()")["output"].strip().endswith("_train")
    assert held.run("batch.numel()")["output"] == "262144\n"
    assert held.run("down()")["place"].endswith("_allocate")


def test_what_was_asked_and_not_begun_when_it_was_let_go_is_answered_too() -> None:
    one = Held(HOLDS)
    told: list[str] = []
    with one.hold._lock:  # the held thread cannot begin
        one.hold.run("1", lambda ok, text, data: told.append(text))
        one.hold._leaving = True
    one.end()
    one.hold.tick()
    assert told == ["console: the rank was released"]


@pytest.mark.parametrize("options", [{}, {"on_oom": "hold"}, {"allow_console": True}])
def test_without_permission_no_code_is_run(options: dict[str, Any]) -> None:
    one = Held(options)
    assert "not started with --on-oom hold --allow-console" in one.hold.run("1", lambda *_: None)
    one.end()


def test_frames_of_an_exception_have_the_line_that_failed_not_where_they_stand() -> None:
    def inner() -> None:
        try:
            raise MemoryError
        finally:
            pass

    with pytest.raises(MemoryError) as raised:
        inner()
    frames, lines = frames_of(raised.value.__traceback__)
    assert frames[-1].f_code is inner.__code__
    assert lines[-1] == inner.__code__.co_firstlineno + 2
    assert sys._getframe() in frames
