"""What is said, and not done, of real DDP ranks that wait for each other: uploads, early ends, locks, skipped steps."""

from pathlib import Path
from typing import Any

import start_ranks
from ftmon.protocol.analysis.deaths.detector import is_lost_peer
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.messages.telemetry import Failure
from ftmon.protocol.recording.reader import Reader
from ftmon_process import Ftmon, wait_until_nothing_is_left
from hub_client import SCRIPTS, App, exit_of, started


def job(mode: str, folder: Path) -> list[str]:
    return start_ranks.command(2, str(SCRIPTS / "stalling_ddp.py"), mode, str(folder))


def test_an_upload_is_no_hang_and_not_ended_and_a_script_that_ends_early_is_named(home: Ftmon, tmp_path: Path) -> None:
    done = home.run("run", "--on-hang", "kill", "--hang-grace", "1", "--", *job("honest", tmp_path), seconds=500)
    assert done.returncode == 1, done.stdout + done.stderr
    run = home.newest()
    with Reader(run.recording) as reader:
        alerts = [alert for alert in reader.alerts() if alert.kind in ("hang", "failure", "died", "note")]
        messages = [frame.message for frame in reader.frames(0, 100_000)]
    (lost,) = [message.error for message in messages if isinstance(message, Failure)]
    (failure,) = alerts
    assert (failure.kind, failure.rank) == ("failure", 1)
    assert (failure.evidence["last_step"], failure.evidence["lost"], failure.step) == ({"1": 39}, 0, 40)
    assert failure.evidence["error"] == lost
    assert is_lost_peer(lost), "closed by peer, or reset by it if something that was sent to it was not read"
    wait_until_nothing_is_left(run)


def test_a_rank_that_waits_for_a_lock_or_skips_collectives_is_named_before_its_patience(tmp_path, private_home):
    with started(job("late", tmp_path)) as run, App(run) as app:

        def accuses(alert: Any) -> bool:
            return alert.kind == "hang" and alert.resolved is None

        alert = app.wait_for(Alert, accuses)
        assert alert.evidence["hung"] == [1]
        late = alert.evidence["ranks"]["1"]
        assert (late["waits_for_lock"], bool(late["lock_held_by"])) == (f"{tmp_path}/cache.lock", True)
        (tmp_path / "released").touch()
        app.wait_for(Alert, lambda alert: alert.kind == "hang" and alert.resolved is not None)
        alert = app.wait_for(Alert, lambda alert: accuses(alert) and alert.evidence["rule"] == "ahead")
        assert (alert.evidence["hung"], alert.evidence["waiting"]) == ([1], [0])
        app.command("kill")
        exit_of(run)
