"""The state the screens draw: a plain fold over messages. No Textual, no sockets, no files but ``runs``."""

from .run import RunInfo, RunModel

__all__ = ["RunInfo", "RunModel"]
