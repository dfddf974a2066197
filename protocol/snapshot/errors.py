"""Errors of snapshot files: one line with the error, the place and the fix."""

from ..errors import FtmonError


class SnapshotError(FtmonError):
    """A file that cannot be opened as a PyTorch memory snapshot; the command ends with status 2."""

    exit_status = 2
