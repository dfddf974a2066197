"""Which signals a launcher forwards to its job."""

import signal
from types import SimpleNamespace

import pytest
from ftmon.trainer.launch import launcher
from ftmon.trainer.launch.launcher import Requests

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("drains", "forwarded"),
    [
        pytest.param([[(TERM, 0.0), (TERM, 0.1)]], [[TERM]], id="directly and through the command"),
        pytest.param([[(TERM, 0.0)], [(TERM, 0.2)]], [[TERM], []], id="the second one later"),
        pytest.param([[(TERM, 0.0), (TERM, 3.0)]], [[TERM]], id="both wait while the launcher stands still"),
        pytest.param([[(TERM, 0.0)], [(TERM, 3.0)]], [[TERM], [TERM]], id="asked again"),
        pytest.param([[(INT, 0.0), (INT, 3.0)]], [[INT, INT]], id="a second Ctrl-C asks for a faster end"),
        pytest.param([[(INT, 0.0), (INT, 0.1)]], [[INT]], id="one Ctrl-C"),
        pytest.param([[(USR1, 0.0), (USR1, 0.1)]], [[USR1, USR1]], id="others are all forwarded"),
    ],
)
def test_requests_to_end_count_once(drains, forwarded, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests()
    for notes, expected in zip(drains, forwarded, strict=True):
        for number, at in notes:
            monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda at=at: at))
            requests.note(number)
        assert requests.drain() == expected
