"""Which loops of the script a thread is in."""

import importlib.util
import os
import threading
from pathlib import Path
from types import ModuleType

from ftmon.trainer.probe.link import stacks

SCRIPT = """
def main(inside, behind):
    for epoch in range(1):
        for batch in range(1):
            inside()
    behind()
"""


def script(folder: Path) -> ModuleType:
    path = folder / "train.py"
    path.write_text(SCRIPT)
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_line_has_the_loops_around_it_and_one_behind_them_has_none(tmp_path: Path) -> None:
    found: list[dict[str, list[tuple[int, int]]]] = []
    look = lambda: found.append(stacks.around(threading.get_ident()))  # noqa: E731
    script(tmp_path).main(look, look)
    inside, behind = found
    assert inside[f"{tmp_path}/train.py:5"] == [(4, 5), (3, 5)]
    assert behind[f"{tmp_path}/train.py:6"] == []


def run_code(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Run a line of a file that does not hold it; return what is found on the stack."""
    found: list[dict[str, list[tuple[int, int]]]] = []
    code = compile("look()", str(path), "exec")
    exec(code, {"look": lambda: found.append(stacks.around(threading.get_ident()))})
    return found[0]


def test_a_file_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    assert f"{tmp_path}/gone.py:1" not in run_code(tmp_path / "gone.py")


def test_a_file_whose_disk_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slow.py")
    assert f"{tmp_path}/slow.py:1" not in run_code(tmp_path / "slow.py")
    (tmp_path / "slow.py").open("w").close()  # its reader ends
