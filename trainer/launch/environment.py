"""What a job is started with: its command, and its environment (its run, the import hook, the flight recorder)."""

import contextlib
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ...protocol.host.private_files import write_private
from ...protocol.link.join import JoinFile, join_path
from ...protocol.run.environment import JOIN_ENV, RUN_ENV, monitor_environment
from ...protocol.run.rundir import RunDir
from ..host.import_hook import INJECT_DIR

_FLIGHT_RECORDER_NAME, _FLIGHT_RECORDER_OLD_NAME = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
_FLIGHT_RECORDER_ENTRIES = "2000"
_RENAMED_IN = (2, 9)
"""First PyTorch version with the new name; it warns about the old one."""

_DEEPSPEED_FILE_ENV = "DS_ENV_FILE"


def job_environment(run: RunDir, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's job, based on the launcher's own (``base``)."""
    environment = _watched(str(run.path), base)
    if join_path(run).exists():
        environment[JOIN_ENV] = str(join_path(run))
    with contextlib.suppress(OSError):  # a full disk must not prevent the job's start
        environment[_DEEPSPEED_FILE_ENV] = str(_deepspeed_exports(run, environment, base))
    return environment


def joined_environment(path: Path, join: JoinFile, base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a run's job on a further host; ``path`` is the file of ``join``."""
    return {**_watched(join.run, base), JOIN_ENV: str(path)}


def executable_command(command: Sequence[str], environment: Mapping[str, str], cwd: str = ".") -> list[str]:
    """Return a command with the interpreter in front of its script if the script's ``#!`` line does not work.

    The kernel ends the interpreter's path at the first space. pip avoids that for the scripts it makes (``torchrun``),
    not for those it copies, such as ``deepspeed``: in an environment whose path has a space they cannot be executed.
    """
    name = command[0]
    program = os.path.join(cwd, name) if os.sep in name else shutil.which(name, path=environment.get("PATH")) or ""
    with contextlib.suppress(OSError):
        with open(program, "rb") as file:
            mark, line = file.read(2), file.readline(1024)
        interpreter = os.fsdecode(line.strip())
        if mark == b"#!" and " " in interpreter and os.path.isfile(interpreter):
            return [interpreter, program, *command[1:]]
    return list(command)


def _watched(run: str, base: Mapping[str, str]) -> dict[str, str]:
    environment = monitor_environment(base)
    environment[RUN_ENV] = run
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INJECT_DIR), base.get("PYTHONPATH"))))
    for key, value in {**flight_recorder(_torch_version()), **_nccl_ras(), "PYTHONUNBUFFERED": "1"}.items():
        environment.setdefault(key, value)
    return environment


def flight_recorder(torch: tuple[int, int] | None) -> dict[str, str]:
    """Return the variables that enable PyTorch's flight recorder; both spellings if the version is unknown."""
    names = [_FLIGHT_RECORDER_NAME] if torch is None or torch >= _RENAMED_IN else []
    if torch is None or torch < _RENAMED_IN:
        names.append(_FLIGHT_RECORDER_OLD_NAME)
    return dict.fromkeys(names, _FLIGHT_RECORDER_ENTRIES)


def _nccl_ras() -> dict[str, str]:
    """Return the variable with the port of NCCL's RAS service: several jobs of one host share its default."""
    with contextlib.suppress(OSError), socket.create_server(("localhost", 0)) as probe:
        return {"NCCL_RAS_ADDR": f"localhost:{probe.getsockname()[1]}"}
    return {}


def _torch_version() -> tuple[int, int] | None:
    """Return the version of the installed PyTorch, without importing it; None if unknown."""
    try:
        major, minor, *_ = version("torch").split(".")
        return int(major), int(minor)
    except (PackageNotFoundError, ValueError):
        return None


def _deepspeed_exports(run: RunDir, environment: Mapping[str, str], base: Mapping[str, str]) -> Path:
    """Write the lines that DeepSpeed exports to other hosts, from the user's ``.deepspeed_env`` files and ftmon's own.

    DeepSpeed's runner forwards only variables with a few prefixes, plus every line of this file.
    """
    name = base.get(_DEEPSPEED_FILE_ENV, ".deepspeed_env")
    lines: list[str] = []
    for folder in ("~", "."):
        try:
            text = (Path(folder).expanduser() / name).read_text()
        except (OSError, UnicodeDecodeError, RuntimeError):  # RuntimeError: the user has no home directory
            continue
        lines += [line for line in text.splitlines() if line not in lines]
    exported = (RUN_ENV, JOIN_ENV, _FLIGHT_RECORDER_NAME, _FLIGHT_RECORDER_OLD_NAME)
    lines += [f"{key}={environment[key]}" for key in exported if key in environment]
    path = run.path / "deepspeed_env"
    write_private(path, "".join(line + "\n" for line in lines).encode())
    return path
