"""A real run of the trainer, watched: what it does besides its steps, and a checkpoint that cannot be written."""

import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.run.rundir import RunDir
from ftmon_process import SMALL, Ftmon, follow_to_end, ftmon_home, lines_with, wait_until_nothing_is_left

WORDS = (
    *SMALL, "training.max_steps=4000", "training.rehearsal=true", "evaluation={share: 0.1, every: 20, samples: 1}",
    "checkpoint={every: 4, keep: 2}", "output.log_every=1",
)  # fmt: skip


class Life:
    def __init__(self, ftmon: Ftmon, folder: Path) -> None:
        self.out = folder / "out"
        with ftmon.start("demo", "--ranks", "1", "--name", "life", *WORDS, f"output.dir={self.out}") as process:
            self.run: RunDir = ftmon.newest()
            self.checkpoints = self.out / "checkpoints"
            eventually(lambda: (self.checkpoints / "latest").exists() or process.poll(), "a first checkpoint", 400)
            eventually(lambda: self.replaced(folder), "a file in the place of the checkpoints")
            self.standing: dict[str, Any] = eventually(lambda: self.alert(ftmon), "the alert")
            self.told = ftmon.run("status", self.run.id).stdout
            self.checkpoints.unlink()
            eventually(lambda: not self.alert(ftmon), "the alert's end")
            eventually(self.evaluated, "an evaluation", 400)
            process.send_signal(signal.SIGINT)
            self.status, self.output, self.errors = follow_to_end(process)
            wait_until_nothing_is_left(self.run)

    def replaced(self, folder: Path) -> bool:
        """Put a file in the place of the checkpoints' folder, which the trainer may have made anew in between."""
        self.checkpoints.rename(folder / f"gone-{len(list(folder.glob('gone-*')))}")
        try:
            self.checkpoints.write_text("in the way")
        except IsADirectoryError:
            return False
        return True

    def alert(self, ftmon: Ftmon) -> dict[str, Any] | None:
        alerts = ftmon.status(self.run.id)["alerts"]
        return next((one for one in alerts if one["evidence"].get("finding") == "checkpoint_failed"), None)

    def evaluated(self) -> bool:
        return any(one["name"] == "evaluation" and one.get("over") for one in self.events("activity"))

    def events(self, kind: str) -> list[dict[str, Any]]:
        import msgspec

        with sqlite3.connect(f"file:{self.run.recording}?mode=ro", uri=True) as connection:
            rows = connection.execute("SELECT body FROM events WHERE type = ? ORDER BY seq", (kind,)).fetchall()
        return [msgspec.msgpack.decode(body) for (body,) in rows]


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("life")
    with ftmon_home(folder / "home", HF_DATASETS_CACHE=str(folder / "cache")) as ftmon:
        yield Life(ftmon, folder)


def test_a_checkpoint_that_failed_raises_an_alert_until_a_later_one_is_complete(life: Life) -> None:
    assert life.standing["severity"] == "error"
    assert "could not be written, at step " in life.standing["title"]
    assert str(life.checkpoints) in life.standing["text"]
    assert "could not be written" in life.told
    with sqlite3.connect(f"file:{life.run.recording}?mode=ro", uri=True) as connection:
        query = "SELECT resolved FROM alerts WHERE id = ? ORDER BY seq DESC LIMIT 1"
        ((resolved,),) = connection.execute(query, (life.standing["id"],)).fetchall()
    assert resolved is not None
    failed = life.events("checkpoint_failed")
    assert failed
    assert failed[0]["path"].startswith(str(life.checkpoints))
    assert "could not be written" in life.output, "the printed lines have the alert"


def test_ctrl_c_stops_a_run_that_the_command_started_and_its_recording_has_all_that_it_did(life):
    assert life.status == 130, life.output + life.errors
    assert "ctrl-c again kills the run" in life.errors
    assert "stopped on request" in life.output, life.errors
    assert lines_with(life.output, ["checkpoint: "])
    activities = life.events("activity")
    assert {one["rank"] for one in activities} == {0}
    begun: dict[str, dict[str, Any]] = {}
    for one in activities:
        begun.setdefault(f"{one['name']}: {one.get('text', '')}".rstrip(": "), one)
    assert begun["data: tokenizing"]["total"] > 700, "records"
    assert "data: packing" in begun
    assert begun["rehearsal: a sample of a checkpoint written and read back"]["total"] == 3
    assert begun["evaluation"]["total"] > 1, "batches"
    assert any(name.startswith("checkpoint: step-") for name in begun)
    ended = [one["name"] for one in activities if one.get("over")]
    assert {"data", "rehearsal", "evaluation", "checkpoint"} <= set(ended)
    assert activities[-1].get("over"), "nothing is left standing"
