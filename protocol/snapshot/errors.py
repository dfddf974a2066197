"""Errors of snapshot files, each one line with what, where and the fix."""

from ..errors import FtmonError


class SnapshotError(FtmonError):
    """A file that cannot be opened as a PyTorch memory snapshot; the command ends with status 2."""

    exit_status = 2
