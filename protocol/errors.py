"""The one tree of errors: each message says what is wrong, where, and the fix."""

from .text import sanitize

MOST_CHARACTERS = 2000
"""Characters of an error's text, at the most."""


class FtmonError(Exception):
    """Root of every error ftmon raises on purpose; its text is one line for the user.

    Paths, keys and values in it are untrusted: the text is sanitised for a terminal, and cut, here.
    """

    exit_status: int = 1

    def __str__(self) -> str:
        """Return the text as one safe line."""
        return sanitize(super().__str__(), MOST_CHARACTERS)


class UsageError(FtmonError):
    """Wrong usage or configuration; the command ends with status 2."""

    exit_status = 2


class StartError(UsageError):
    """The command of a run cannot be started: it does not exist, or is not executable."""


class ConfigError(UsageError):
    """A configuration file or override that cannot be used; the text starts with ``file:line: dotted.path``."""


class RunNotFoundError(UsageError):
    """No run, or more than one, matches the name a person gave."""


class SeveralRunsError(RunNotFoundError):
    """More than one run matches the name a person gave."""


class ProtocolError(FtmonError):
    """A peer speaks something this side does not understand."""


class VersionError(ProtocolError):
    """A peer, ``sender``, speaks another major version of the protocol."""

    def __init__(self, sender: str, text: str) -> None:
        super().__init__(text)
        self.sender = sender


class RunDirError(FtmonError):
    """The run directory has the wrong owner, permissions or content."""


class HubError(FtmonError):
    """The hub of a run cannot be started, reached or asked."""


class RecordingError(FtmonError):
    """A recording cannot be opened: not one at all, of a newer schema, or damaged beyond reading."""
