"""What becomes of the processes of a prediction's ranks."""

import os
import signal
from collections.abc import Callable

import pytest
from ftmon.protocol.errors import ConfigError
from ftmon.trainer.predict import ranks
from ftmon.trainer.predict.dry import DryRun


def test_a_refusal_in_a_ranks_process_is_raised_here() -> None:
    def refuse(rank: int) -> DryRun:
        raise ConfigError(f"rank {rank}: no such stage")

    with pytest.raises(ConfigError, match="rank 3: no such stage"):
        ranks.run(refuse, [3], [8])


def test_a_ranks_process_that_dies_is_told_by_its_signal() -> None:
    def die(rank: int) -> DryRun:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    with pytest.raises(ConfigError, match="rank 1 was killed by SIGKILL"):
        ranks.run(die, [1], [8])


def _raise() -> None:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("call", "words", "traceback"),
    [
        (lambda: os._exit(7), "the dry run ended with exit status 7, without a result", False),
        (lambda: os._exit(0), "the dry run ended with exit status 0, without a result", False),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "the dry run was killed by SIGKILL", False),
        (_raise, "the dry run failed; its traceback is above", True),
    ],
)
def test_how_a_process_without_a_result_ended_is_reported(
    call: Callable[[], None], words: str, traceback: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as refusal:
        ranks.once(call, type(None))
    assert str(refusal.value) == words
    assert ("RuntimeError: no" in capfd.readouterr().err) is traceback
