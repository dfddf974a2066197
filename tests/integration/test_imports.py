"""What importing a part of ftmon brings, and what it can do without."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("ftmon", ("torch", "textual", "zmq", "numpy")),
        ("ftmon.protocol.recording.reader", ("torch", "textual", "numpy", "asyncio", "psutil")),
        ("ftmon.protocol.link.keys", ("torch", "textual", "asyncio")),
        # A configuration with an error is refused at once.
        ("ftmon.trainer.predict.__main__", ("torch", "transformers")),
        ("ftmon.trainer.predict.decide", ("torch", "transformers")),
    ],
)
def test_importing_a_part_brings_nothing_heavy(module: str, forbidden: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*sorted(set({forbidden!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.split() == []


def test_the_terminal_side_of_the_protocol_imports_where_there_is_no_fcntl() -> None:
    code = (
        "import sys; sys.modules['fcntl'] = None\n"
        "import ftmon.protocol.run.rundir, ftmon.protocol.link.sockets, ftmon.protocol.recording.reader\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_configuration_for_several_gpus_is_resolved_without_torch(tmp_path: Path) -> None:
    """Its import takes seconds, in which no rank begins."""
    (tmp_path / "data.jsonl").write_text('{"text": "some text"}\n')
    sizes = "hidden_size: 64, num_hidden_layers: 2, vocab_size: 100"
    words = [f"model.config={{model_type: llama, {sizes}}}", f"data.path={tmp_path / 'data.jsonl'}"]
    code = (
        "import sys\n"
        "from ftmon.trainer.recipe.config.load import load\n"
        "from ftmon.trainer.recipe.preflight import resolve\n"
        f"found = resolve.resolve(load(None, {words!r}), elsewhere=2).config\n"
        "print(found.zero.stage, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.split() == ["1", "False"]


def test_transformers_lists_its_models_as_by_itself() -> None:
    code = (
        "from pathlib import Path\n"
        "from ftmon.trainer.predict.ranks import import_transformers\n"
        "import_transformers()\n"
        "import transformers.models\n"
        "from transformers.utils import import_utils\n"
        "own, (plain,) = import_utils.define_import_structure, [\n"
        "    cell.cell_contents for cell in import_utils.define_import_structure.__closure__\n"
        "    if hasattr(cell.cell_contents, 'cache_info')\n"
        "]\n"
        "file = str(Path(transformers.__file__).parent / 'models' / '__init__.py')\n"
        "print(own(file) == plain(file), len(own(file)) > 3)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=200)
    assert done.stdout.split() == ["True", "True"]
