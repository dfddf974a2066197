"""The environment variables by which processes of a run know it. Imports next to nothing: every rank reads it first.

One rule: a process of ftmon's own carries none of them (``monitor_environment``), and a process of the job carries
those of its run (``trainer.launch.environment``). What else a process needs to know it reads in the files they name.
"""

from collections.abc import Mapping

RUN_ENV = "FTMON_RUN"
"""The run directory; also marks every process of the job."""
RANK_PID_ENV = "FTMON_RANK_PID"
"""Set by a rank in its own environment: every process it starts carries the pid of its rank, and is no rank."""
JOIN_ENV = "FTMON_JOIN"
"""Path of ``join.json``, for ranks on other hosts."""
PLACE_ENV = "FTMON_PLACE"
"""Set by a rank on another host than the hub's: the directory that stands in for the run's there."""

_MARKS = (RUN_ENV, RANK_PID_ENV, JOIN_ENV, PLACE_ENV)


def monitor_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any run's mark, for ftmon's own processes: they must not be found as a run's."""
    return {key: value for key, value in base.items() if key not in _MARKS}
