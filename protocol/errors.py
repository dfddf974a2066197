"""The one tree of errors: each message says what is wrong, where, and the mend."""


class FtmonError(Exception):
    """Root of every error ftmon raises on purpose; its text is one line fit to show a person."""

    exit_status: int = 1


class UsageError(FtmonError):
    """Wrong usage or configuration; the command ends with status 2."""

    exit_status = 2


class ConfigError(UsageError):
    """A configuration file or override that cannot be used; the text starts with ``file:line: dotted.path``."""


class RunNotFoundError(UsageError):
    """No run, or more than one, matches the name a person gave."""


class ProtocolError(FtmonError):
    """A peer speaks something this side does not understand."""


class VersionError(ProtocolError):
    """A peer speaks another major version of the protocol."""


class RunDirError(FtmonError):
    """The run directory has the wrong owner, permissions or content."""


class HubError(FtmonError):
    """The hub of a run cannot be started, reached or asked."""


class RecordingError(FtmonError):
    """A recording cannot be opened: not one at all, of a newer schema, or damaged beyond reading."""
