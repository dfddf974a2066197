"""What can be wrong with a snapshot file, each in one line that says what, where and the remedy."""

from ..errors import FtmonError


class SnapshotError(FtmonError):
    """A file that cannot be opened as a PyTorch memory snapshot; the command ends with status 2."""

    exit_status = 2
