"""The state that the screens draw: a fold over messages, without Textual, sockets or files (except ``runs``)."""

from .run import RunInfo, RunModel

__all__ = ["RunInfo", "RunModel"]
