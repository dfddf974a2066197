"""The blows: against the monitor, which the training must not feel, and against the training, which ends it or not."""

import contextlib
import os
import signal
import time
from collections.abc import Callable

from ftmon.trainer.host import processes

from .scene import ChaosError, Scene


def kill_hub(scene: Scene) -> None:
    pid = scene.hub()
    os.kill(pid, signal.SIGKILL)
    scene.wait(lambda: (hub := scene.run.living_hub()) is not None and hub.process.pid != pid, 40, "another hub")


def stop_hub(scene: Scene) -> None:
    scene.freeze(scene.hub())


def kill_app(scene: Scene) -> None:
    assert scene.app is not None
    scene.app.kill()
    scene.app.wait(20)
    scene.app_killed = True


def stop_app(scene: Scene) -> None:
    if scene.living_app():
        scene.freeze(*scene.living_app())


def stop_launcher(scene: Scene) -> None:
    scene.freeze(scene.launcher())


def stop_monitor(scene: Scene) -> None:
    """The monitor's clock stands still: nothing of it looks, and then much time has passed at once."""
    scene.freeze(*scene.monitor())


def full_disk(scene: Scene) -> None:
    filler = scene.disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), filler.open("ab", buffering=0) as file:  # what it made free, too
            file.write(bytes(4096))
        time.sleep(0.2)
    filler.unlink()
    time.sleep(3)


def remove_recording(scene: Scene) -> None:
    """Its file alone; a new one is begun, and says what is missing."""
    scene.run.recording.unlink()
    scene.wait(scene.run.recording.exists, 40, "a new recording")


def stop_rank(scene: Scene) -> None:
    rank = scene.draw.randrange(2)
    scene.touch(rank)
    os.kill(scene.pid(rank), signal.SIGSTOP)
    scene.wait(lambda: scene.alerts("hang"), 30, "an alert of the stopped rank")
    if scene.draw.random() < 0.5:
        os.kill(scene.pid(rank), signal.SIGCONT)
        scene.wait_steps(20)
        scene.wait_quiet()


def kill_rank(scene: Scene) -> None:
    rank = scene.draw.randrange(2)
    scene.touch(rank)
    os.kill(scene.pid(rank), signal.SIGKILL)
    scene.wait(scene.run.read_exit, 60, "the run's end")


def kill_torchrun(scene: Scene) -> None:
    scene.touch()
    rank = processes.read(scene.pid(scene.rank_here()))
    if rank is None:
        raise ChaosError("the rank is gone")
    os.kill(rank.parent, signal.SIGKILL)
    scene.wait(scene.run.read_exit, 60, "the run's end")


def kill_launcher(scene: Scene) -> None:
    """Nobody restarts a hub any more; the job goes on."""
    os.kill(scene.launcher(), signal.SIGKILL)
    scene.wait_steps(20)


MONITOR: dict[str, Callable[[Scene], None]] = {
    "kill hub": kill_hub,
    "stop hub": stop_hub,
    "kill app": kill_app,
    "stop app": stop_app,
    "stop launcher": stop_launcher,
    "full disk": full_disk,
    "stop monitor": stop_monitor,
    "remove recording": remove_recording,
}
"""What must not be felt by the training."""
TRAINING: dict[str, Callable[[Scene], None]] = {
    "stop rank": stop_rank,
    "kill rank": kill_rank,
    "kill torchrun": kill_torchrun,
    "kill launcher": kill_launcher,
}
"""After one of these comes no other."""
SMALL = tuple(MONITOR)[:5]
"""What may follow another blow."""
