"""The run directory: private, found by name, refused where it could be somebody else's."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest
import zmq
from ftmon.protocol.errors import HubError, RunDirError, RunNotFoundError
from ftmon.protocol.host import process
from ftmon.protocol.host.process import ProcessId, is_alive, this_process
from ftmon.protocol.link import keys, sockets
from ftmon.protocol.run import rundir
from ftmon.protocol.run.rundir import ExitFile, HubFile, RunDir

pytestmark = pytest.mark.usefixtures("private_home")


def make(name: str, created: float | None = None) -> RunDir:
    run = rundir.create(name, ["python", "train.py"], "run")
    if created is not None:
        os.utime(run.path / "run.json", (created, created))
    return run


def live(run: RunDir) -> None:
    run.write_hub(HubFile(this_process(), {}, "0.1.0", "here", 0.0))


def test_everything_in_it_is_for_its_owner_alone_even_under_an_open_umask(private_home: Path) -> None:
    before = os.umask(0)
    try:
        run = make("demo")
        live(run)
        run.write_exit(ExitFile(0, 1.0, "finished"))
        os.close(run.lock_hub())
    finally:
        os.umask(before)
    for folder in (private_home / "runs", run.path, run.logs, run.snapshots):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, folder
    for file in ("run.json", "hub.json", "exit.json", "hub.lock"):
        assert stat.S_IMODE((run.path / file).stat().st_mode) == 0o600, file
    run.check()


@pytest.mark.parametrize(("name", "words"), [(b"caf\xe9", "not UTF-8"), (b"gone", "no longer exists")])
def test_nothing_is_made_of_a_run_in_a_directory_that_cannot_be_named(private_home, tmp_path, monkeypatch, name, words):
    folder = tmp_path / os.fsdecode(name)
    folder.mkdir()
    monkeypatch.chdir(folder)
    if name == b"gone":
        folder.rmdir()
    with pytest.raises(RunDirError, match=words):
        make("demo")
    assert not private_home.exists()


def test_a_link_a_stranger_and_an_open_directory_are_refused(tmp_path: Path) -> None:
    run = make("demo")
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with pytest.raises(RunDirError, match="is not a directory of its own"):
        RunDir(link).check()
    with pytest.raises(RunDirError, match="no such run directory"):
        RunDir(tmp_path / "none").check()
    run.path.chmod(0o755)
    with pytest.raises(RunDirError, match="chmod 700"):
        run.check()
    if os.getuid() == 0:
        run.path.chmod(0o700)
        os.chown(run.path, 65534, 65534)
        with pytest.raises(RunDirError, match="belongs to another user"):
            run.check()


def test_no_run_is_made_where_others_could_exchange_it_or_nothing_can_be_made(private_home: Path) -> None:
    (private_home / "runs").mkdir(parents=True)
    (private_home / "runs").chmod(0o777)
    with pytest.raises(RunDirError, match="others may write there; run: chmod 700"):
        make("demo")
    (private_home / "runs").rmdir()
    (private_home / "runs").write_text("")
    with pytest.raises(RunDirError, match=r"^[^\n]*set FTMON_HOME$"):
        make("demo")


@pytest.mark.parametrize("use", [rundir.all_runs, lambda: rundir.find(None), lambda: make("demo"), keys.keys_dir])
def test_a_home_of_another_user_or_open_to_others_is_refused_on_every_use(private_home, tmp_path, monkeypatch, use):
    private_home.mkdir(mode=0o700)
    private_home.chmod(0o777)
    with pytest.raises(RunDirError, match="others may write there; run: chmod go-w"):
        use()
    private_home.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(private_home)
    monkeypatch.setenv("FTMON_HOME", str(link))
    make("demo")
    use()  # a link of one's own to a directory of one's own
    # Where another user owns the directory, or the link: as the file system would say it.
    real = os.lstat(link)
    for owned in ("lstat", "stat"):
        theirs = os.stat_result((*real[:4], os.getuid() + 1, *real[5:]))
        with monkeypatch.context() as patch:
            patch.setattr(Path, owned, lambda _, theirs=theirs, **__: theirs)
            with pytest.raises(RunDirError, match=f"{link} -> {private_home}: belongs to another user"):
                use()
    link.unlink()
    link.symlink_to(tmp_path / "nothing")
    with pytest.raises(RunDirError, match="leads nowhere"):
        use()


def test_a_name_becomes_an_identifier_never_used_twice_and_one_that_several_share_means_the_living():
    ids = [make("../my run/№1").id for _ in range(4)]
    assert len(set(ids)) == 4
    for identifier in ids:
        assert re.fullmatch(r"my-run-1-\d{8}-\d{6}(-[0-9a-f]{4})?", identifier)
    first, second = make("demo", 1.0), make("demo", 2.0)
    with pytest.raises(RunNotFoundError) as error:
        rundir.find("demo")
    assert str(error.value) == f"'demo' matches 2 runs: {second.id}, {first.id}; name one of them"
    live(first)
    assert rundir.find("demo").id == first.id


def test_a_run_is_found_by_identifier_name_or_beginning_and_no_name_means_the_living_else_the_newest() -> None:
    with pytest.raises(RunNotFoundError, match="start one with 'ftmon demo'"):
        rundir.find("demo")
    old, new = make("llama-sft", 100.0), make("demo", 200.0)
    for name in (old.id, "llama-sft", "llama", old.id[:-2]):
        assert rundir.find(name).id == old.id
    with pytest.raises(RunNotFoundError, match=f"the newest is {new.id}"):
        rundir.find("nothing")
    assert rundir.find(None).id == new.id
    live(old)
    assert rundir.find(None).id == old.id
    make("demo-large")
    assert rundir.find("demo").id == new.id, "a whole name goes before a beginning"
    with pytest.raises(RunNotFoundError, match="matches 2 runs"):
        rundir.find("dem")


def test_what_is_no_run_and_a_damaged_neighbour_are_passed_over(private_home: Path) -> None:
    run, damaged = make("demo", 1.0), make("other", 2.0)
    (private_home / "runs" / "stray").mkdir()
    (private_home / "runs" / "file").write_text("")
    (damaged.path / "hub.json").write_text("{")
    assert {found.id for found in rundir.all_runs()} == {run.id, damaged.id}
    assert (rundir.find("demo").id, rundir.find(None).id) == (run.id, damaged.id)
    with pytest.raises(RunDirError, match=r"hub\.json: cannot be read"):
        damaged.living_hub()


def test_a_pid_used_again_is_another_process_and_only_one_hub_holds_the_lock() -> None:
    mine = this_process()
    assert is_alive(mine)
    assert not is_alive(ProcessId(mine.pid, mine.start_ticks + 1))
    assert not is_alive(ProcessId(0, 0))
    run = make("demo")
    held = run.lock_hub()
    with pytest.raises(HubError, match="another hub of this run is alive"):
        run.lock_hub()
    os.close(held)
    os.close(run.lock_hub())


def test_a_long_home_gets_short_private_socket_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / ("deep" * 20) / ("er" * 30)))
    run = make("demo")
    address = run.ipc_address("control")
    path = Path(address.removeprefix("ipc://"))
    assert len(os.fsencode(path)) < 104
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert RunDir(run.path).ipc_address("control") == address, "a rank with its own TMPDIR must find the hub"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets.bind(sockets.hub_socket(context, "control"), address)
        assert path.exists()
    finally:
        context.destroy(linger=0)
    run.remove_sockets(sockets.CHANNELS)
    assert not path.parent.exists()
    path.parent.symlink_to(tmp_path)  # a planted one is refused
    try:
        with pytest.raises(RunDirError, match="is not a directory of its own"):
            run.ipc_address("control")
    finally:
        path.parent.unlink()


def test_a_file_is_written_whole_or_not_at_all_and_a_run_on_a_full_disk_is_refused_in_words(tmp_path, monkeypatch):
    target = tmp_path / "file"
    process.write_private(target, b"old")
    with pytest.raises(TypeError):
        process.write_private(target, "no bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["file"]

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(rundir, "write_private", full)
    with pytest.raises(RunDirError, match="No space left on device; set FTMON_HOME"):
        rundir.create("run", ["train.py"], "run")
