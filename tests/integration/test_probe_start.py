import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import ftmon.trainer.probe.rank.roles as roles

INJECT = Path(roles.__file__).parents[1] / "inject"


def run_python(code, tmp_path, *path, argv=("-c",), **environment):
    (tmp_path / "logs").mkdir(exist_ok=True)
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "FTMON_RANK_PID")}
    return subprocess.run(
        [sys.executable, *argv, textwrap.dedent(code)],
        env={
            **clean,
            "FTMON_RUN": str(tmp_path),
            "PYTHONPATH": os.pathsep.join([str(INJECT), *map(str, path)]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
    )


def test_a_process_that_trains_nothing_imports_neither_torch_nor_zmq(tmp_path):
    done = run_python(
        """
        import json, sys
        print(json.dumps([name in sys.modules for name in ("torch", "zmq", "msgspec", "numpy", "asyncio")]))
        """,
        tmp_path,
    )
    assert json.loads(done.stdout) == [False] * 5, done.stderr


def test_another_sitecustomize_further_down_the_path_still_runs(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import builtins\nbuiltins.other_ran = True\n")
    done = run_python("import sitecustomize\nprint(other_ran, sitecustomize.__file__)", tmp_path, other)
    assert done.stdout.split() == ["True", str(other / "sitecustomize.py")]


def test_without_a_run_nothing_happens_and_with_logs_off_a_rank_keeps_its_output(tmp_path):
    done = run_python("import sys; print('ftmon' in sys.modules)", tmp_path, FTMON_RUN="")
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    (tmp_path / "run.json").write_text('{"options": {"logs": false}}')
    assert run_python("print('here')", tmp_path, RANK="0", WORLD_SIZE="1").stdout == "here\n"


def test_a_broken_ftmon_is_logged_and_harms_nothing(tmp_path):
    broken = tmp_path / "broken" / "ftmon"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('broken installation')\n")
    done = run_python("print('fine')", tmp_path, broken.parent)
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
    assert "broken installation" in (tmp_path / "logs" / "probe.log").read_text()


def test_a_rank_writes_into_the_run_s_log_files_from_its_first_line(tmp_path):
    done = run_python(
        """
        import os, sys
        print("out", os.environ["FTMON_RANK_PID"] == str(os.getpid()))
        os.system("echo from a child")
        sys.stderr.write("err\\n")
        """,
        tmp_path,
        RANK="2",
        WORLD_SIZE="4",
        PYTHONUNBUFFERED="1",
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert (tmp_path / "logs" / "rank-2.out").read_text() == "out True\nfrom a child\n"
    assert (tmp_path / "logs" / "rank-2.err").read_text() == "err\n"


def test_a_launcher_inside_a_rank_is_refused_in_one_line_before_it_runs(tmp_path):
    script = tmp_path / "torchrun"
    script.write_text("print('spawned everything again')\n")
    done = run_python("x", tmp_path, argv=(str(script),), FTMON_RANK_PID=str(os.getpid()))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ftmon: refused: 'torchrun' was started from inside a rank")
    assert done.stderr.count("\n") == 1


def test_a_module_is_acted_on_after_its_import_and_its_loader_is_left_alone(tmp_path):
    package = tmp_path / "awaited"
    package.mkdir()
    (package / "__init__.py").write_text("from . import inner\nready = True\n")
    (package / "inner.py").write_text("value = 1\n")
    (package / "data.txt").write_text("data")
    done = run_python(
        """
        from ftmon.trainer.probe.hooks.imports import after_import
        seen = []
        after_import("awaited", lambda module: seen.append(module.ready))
        after_import("awaited.inner", lambda module: 1 / 0)
        after_import("json", lambda module: seen.append(module.__name__))
        import awaited, importlib.resources
        assert importlib.resources.files("awaited").joinpath("data.txt").read_text() == "data"
        import importlib; importlib.reload(awaited)
        import sys; assert type(awaited.__loader__).__name__ == "SourceFileLoader"
        import json
        print(seen)
        """,
        tmp_path,
        tmp_path,
    )
    assert done.stdout == "['json', True]\n", done.stderr
    assert "ZeroDivisionError" in (tmp_path / "logs" / "probe.log").read_text()
