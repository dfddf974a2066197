"""Environment variables that identify the run of a process. Every rank imports this first, so it imports very little.

ftmon's own processes have none of them (``monitor_environment``); processes of the job have those of their run
(``trainer.launch.environment``). Everything else is in the files that these variables name.
"""

from collections.abc import Mapping

RUN_ENV = "FTMON_RUN"  # the run directory; it also marks every process of the job
RANK_PID_ENV = "FTMON_RANK_PID"
"""Set by a rank in its own environment: the processes it starts inherit the rank's pid, and are no ranks themselves."""
JOIN_ENV = "FTMON_JOIN"  # path of `join.json`, for ranks on other hosts
PLACE_ENV = "FTMON_PLACE"
"""Set by a rank on another host than the hub's: the directory that replaces the run directory there."""
_MARKS = (RUN_ENV, RANK_PID_ENV, JOIN_ENV, PLACE_ENV)


def monitor_environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any run's variables, for ftmon's own processes, which must not count as a run's."""
    return {key: value for key, value in base.items() if key not in _MARKS}
