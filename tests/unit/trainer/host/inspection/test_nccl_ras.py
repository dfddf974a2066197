"""NCCL's RAS service: a real socket that answers as NCCL did, and what its answer says of the ranks."""

import socket
import threading
from collections.abc import Iterator

import pytest
from ftmon.trainer.host.inspection import nccl_ras
from places import DATA

ONE_BEHIND = (DATA / "nccl_ras_one_behind.txt").read_text()
ANSWER = ONE_BEHIND[ONE_BEHIND.index("{") :]
MISSING = (DATA / "nccl_ras_missing_process.txt").read_text()
PIDS = {0: 1937, 1: 1938}


@pytest.fixture
def service() -> Iterator[str]:
    """Answer once a whole request has arrived, as NCCL does; the first connection never, as a stopped process."""
    listening = socket.create_server(("localhost", 0))
    kept: list[socket.socket] = []

    def serve() -> None:
        kept.append(listening.accept()[0])
        connection, _ = listening.accept()
        with connection:
            request = b""
            while not request.endswith(b"status\n"):
                request += connection.recv(4096)
            connection.sendall(ONE_BEHIND.encode())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"localhost:{listening.getsockname()[1]}"
    thread.join(10.0)
    for one in (*kept, listening):
        one.close()


def test_another_process_is_asked_if_the_first_is_stopped_and_nothing_is_known_where_nothing_answers(service):
    assert set(nccl_ras.launched(nccl_ras.query(service), PIDS)) == {0, 1}
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
    assert nccl_ras.query(f"localhost:{port}") == ""
    assert nccl_ras.query("no port") == ""
    assert nccl_ras.launched("", PIDS) == {}


def test_each_rank_has_its_count_of_each_communicator_and_processes_of_other_jobs_are_left_out():
    found = nccl_ras.launched(ANSWER, PIDS)
    first, second = "0x8af9549a5789929", "0xbaec0244dd796cfd"
    assert found[0].members == {first: (0, 1), second: (0, 1)}
    calls = [{call.group: (call.number, call.done) for call in found[rank].recent} for rank in (0, 1)]
    assert calls == [{first: (60, None), second: (248, False)}, {first: (61, False), second: (246, None)}]
    assert nccl_ras.launched(ANSWER, {0: 1937, 1: 4}) == {}
    assert nccl_ras.launched(MISSING[MISSING.index("{") :], {0: 3061, 1: 3062}) == {}
