"""The job of a launcher's command: script, arguments, ranks, environment."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Launched:
    """The job that a command would start."""

    script: str
    """A file, or with ``is_module`` a module."""
    is_module: bool
    arguments: list[str]
    ranks: int | None
    """Number of ranks; None: the launcher would count this machine's GPUs."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Environment variables from the launcher, without the ranks' numbers."""
