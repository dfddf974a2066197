"""Locates a run's hub, by its run directory on this host or by addresses."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...protocol.errors import FtmonError, RecordingError
from ...protocol.host.process import ProcessId, is_alive
from ...protocol.recording.reader import Reader
from ...protocol.run.rundir import RunDir
from .history import History


@dataclass(frozen=True, slots=True)
class Hub:
    """A hub to connect to; a different process at the same addresses is a different hub."""

    addresses: Mapping[str, str]
    process: ProcessId | None = None
    read_only: bool = False


class Endpoint:
    """Finds a run's hub, checks whether it is alive, and opens the recording if it is local."""

    def __init__(self, run: RunDir | None = None, addresses: Mapping[str, str] | None = None) -> None:
        """Use a run directory of this host, or the channels' addresses (``sockets.CHANNELS``) elsewhere."""
        if (run is None) == (addresses is None):
            raise ValueError("give a run directory or addresses")
        self._run = run
        self._addresses = addresses

    @property
    def local(self) -> bool:
        """Whether the hub's process is on this host."""
        return self._run is not None

    @property
    def trouble(self) -> str:
        """Why no hub is found, if the reason is not that the hub is gone; else empty."""
        return ""

    def hub(self) -> Hub | None:
        """Return the living hub, or None if there is none."""
        if self._run is None:
            assert self._addresses is not None
            return Hub(self._addresses)
        try:
            self._run.check()
            found = self._run.living_hub()
        except FtmonError:
            return None
        return Hub(found.addresses, found.process, found.read_only) if found else None

    def is_alive(self, hub: Hub) -> bool:
        """Return whether this hub process is alive; True for a hub on another host, where it is unknown."""
        return hub.process is None or is_alive(hub.process)

    def ended(self) -> bool:
        """Return whether the run has ended, and no process would start a hub any more.

        A launcher outlives its job until a hub has recorded the end, even if that hub starts after the end.
        """
        if self._run is None:
            return False
        try:
            launcher = self._run.read_run().launcher
            return self._run.read_exit() is not None if launcher is None else not is_alive(launcher)
        except FtmonError:
            return True

    def open_recording(self) -> History:
        """Open the recording file.

        Raises:
            RecordingError: it is not on this host, or cannot be read.
        """
        if self._run is None:
            raise RecordingError("the recording is on another host, and its hub is gone")
        return Reader(self._run.recording)
