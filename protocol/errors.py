"""The hierarchy of ftmon's errors. Each text states the error, its place and the fix."""

from .text import sanitize

MOST_CHARACTERS = 2000


class FtmonError(Exception):
    """Base class of all errors that ftmon raises deliberately; the text is one line for the user.

    Paths, keys and values in it are untrusted, so ``__str__`` sanitises the text for a terminal and truncates it.
    """

    exit_status: int = 1

    def __str__(self) -> str:
        return sanitize(super().__str__(), MOST_CHARACTERS)


class UsageError(FtmonError):
    """Wrong usage or configuration; the command ends with status 2."""

    exit_status = 2


class StartError(UsageError):
    """The command of a run cannot be started: it does not exist, or is not executable."""


class ConfigError(UsageError):
    """A configuration file or override that cannot be used; the text starts with ``file:line: dotted.path``."""


class RunNotFoundError(UsageError):
    """No run, or more than one, matches the given name."""


class SeveralRunsError(RunNotFoundError):
    """More than one run matches the given name."""


class ProtocolError(FtmonError):
    """A peer sent something this side cannot decode."""


class VersionError(ProtocolError):
    """The peer ``sender`` uses another major version of the protocol."""

    def __init__(self, sender: str, text: str) -> None:
        super().__init__(text)
        self.sender = sender


class RunDirError(FtmonError):
    """The run directory has the wrong owner, permissions or content."""


class HubError(FtmonError):
    """The hub of a run cannot be started, reached or queried."""


class RecordingError(FtmonError):
    """A recording cannot be read: it is not a recording, of a newer schema, refused, or too damaged."""


class TargetError(FtmonError):
    """A system that a run is sent to (``--report-to``) refused it. The text has no key, and no path of an address."""
