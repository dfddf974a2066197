"""Which lock file a rank's training thread waits for, and whether somebody builds beside it."""

import os
import subprocess
import threading
from pathlib import Path

from eventually import eventually
from ftmon.trainer.probe.link import stacks
from torch.utils.file_baton import FileBaton


def test_a_wait_for_a_builds_lock_is_found_with_its_file_and_whether_a_compiler_works_there(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (1e9, 1e9))
    thread = threading.Thread(target=FileBaton(str(lock), 0.01).wait)
    thread.start()
    compiler: subprocess.Popen[bytes] | None = None
    try:
        ident = thread.ident
        assert ident is not None
        found = eventually(lambda: stacks.waits_for(ident), "its wait")
        assert (found["path"], found["build"], found["compiler"]) == (str(lock), True, False)
        assert found["idle_s"] > 1e6
        program = tmp_path / "ninja"
        program.symlink_to("/bin/sleep")
        elsewhere = subprocess.Popen([str(program), "600"], cwd="/")
        try:
            assert not stacks.waits_for(ident)["compiler"], "it builds something else"
        finally:
            elsewhere.kill()
            elsewhere.wait()
        compiler = subprocess.Popen([str(program), "600"], cwd=tmp_path)
        eventually(lambda: stacks.waits_for(ident).get("compiler"), "the compiler beside it")
    finally:
        lock.unlink()
        thread.join()
        if compiler is not None:
            compiler.kill()
            compiler.wait()
    assert stacks.waits_for(threading.get_ident()) == {}
