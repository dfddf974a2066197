"""What ships is what is meant to, and importing ftmon stays light."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_list_of_packages_is_the_packages_on_disk() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["setuptools"]["packages"]
    found = {"ftmon"}
    for top in ("protocol", "trainer", "tui"):
        found |= {
            ".".join(("ftmon", *path.parent.relative_to(ROOT).parts)) for path in (ROOT / top).rglob("__init__.py")
        }
    assert sorted(listed) == sorted(found)


def test_every_module_lies_in_a_listed_package() -> None:
    for top in ("protocol", "trainer", "tui"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path} is in no package and would not ship"


def test_no_other_module_lies_at_the_root() -> None:
    assert [path.name for path in ROOT.glob("[!.]*.py")] == ["__init__.py"]


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("ftmon", ("torch", "textual", "zmq", "numpy")),
        ("ftmon.protocol.recording.reader", ("torch", "textual", "numpy", "asyncio", "psutil")),
        ("ftmon.protocol.keys", ("torch", "textual", "asyncio")),
    ],
)
def test_importing_a_part_brings_nothing_heavy(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set({forbidden!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == []


def test_the_terminal_side_of_the_protocol_imports_where_there_is_no_fcntl() -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import ftmon.protocol.rundir, ftmon.protocol.sockets, ftmon.protocol.recording.reader\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
