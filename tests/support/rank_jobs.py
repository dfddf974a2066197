"""Programs that run several small jobs in one set of ranks, and what each job printed."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

from ftmon.trainer.recipe import start


def outputs(words: list[str], environment: dict[str, str], seconds: float) -> dict[str, str]:
    """Run a command that must end with 0; return the text after each line ``== NAME``."""
    return sections(finished(words, environment, seconds))


def finished(words: list[str], environment: dict[str, str], seconds: float) -> str:
    """Run a command that must end with 0; return what it printed."""
    done = run(words, environment, seconds)
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(words: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )


def sections(text: str) -> dict[str, str]:
    """Return the text after each line ``== NAME``, by name."""
    return dict(re.findall(r"== (\S+)\n(.*?)(?=\n?== \S+\n|\Z)", text, re.DOTALL))


def environment_of(resolved: Any, cache: Path) -> dict[str, str]:
    """Return the environment of ranks outside of any run, with a folder of its own for prepared data sets."""
    environment = {**os.environ, **start.launch_environment(resolved), "HF_DATASETS_CACHE": str(cache)}
    environment.pop("FTMON_RUN", None)
    return environment


def launcher(resolved: Any) -> list[str]:
    """Return DeepSpeed's launcher for the ranks of a configuration, without the module that it would start."""
    return [word for word in start.launch_command(resolved) if word != "--module"][:-1]
