"""``--notify``: a real hub runs commands and posts to a real server."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from eventually import eventually
from ftmon.protocol.messages.control import Alert
from ftmon.protocol.recording.reader import Reader
from ftmon.protocol.run.exits import RUN_USAGE
from ftmon.protocol.run.notices import Notice, Notify
from ftmon.protocol.run.rundir import RunDir
from ftmon.trainer.hub import notify
from ftmon.trainer.hub.notify import DeliveryError, Notifier, deliver
from ftmon_process import wait_until_nothing_is_left

NOTICE = Notice("oom", "train-1", "node", 5.0, "rank 0 out of memory", "try a smaller batch")


class Server:
    """A webhook: keeps what is posted; refuses the first ``refusals`` posts."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refusals = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if outer.refusals:
                    outer.refusals -= 1
                    self.send_error(503)
                else:
                    outer.bodies.append(body)
                    self.send_response(204)
                    self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/secret"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.http.shutdown()
    found.http.server_close()


def rules(run: RunDir) -> list[str]:
    with Reader(run.recording) as reader:
        return [alert.evidence["rule"] for alert in reader.alerts()]


def test_a_run_that_fails_notifies_a_command_and_a_webhook_and_keeps_the_address_secret(home, tmp_path, server):
    script = tmp_path / "early.py"
    script.write_text("raise SystemExit('no data at /nowhere')\n")
    kept = tmp_path / "notices"
    server.refusals = 1
    words = ["--notify", f"cat >> {kept}; echo >> {kept}", "--notify", server.address, "--notify", "exit 7"]
    done = home.run("run", "--plain", *words, "--", "python", str(script))
    assert done.returncode == 1, done.stdout + done.stderr
    run = home.newest()
    eventually(lambda: server.bodies, "the webhook")
    (told,) = [json.loads(line) for line in kept.read_text().splitlines()]
    assert (told["event"], told["run"]) == ("failure", run.id)
    why = "ended without a recorded step: no rank reported; the last line that it wrote: no data at /nowhere"
    assert told["title"] == f"{run.id} failed: {why}"
    (body,) = server.bodies
    assert body["event"] == "failure"
    assert run.id in body["text"]
    assert body["text"] == body["content"]
    hub_log = run.logs / "hub.log"
    eventually(lambda: "notify exit: exit status 7" in hub_log.read_text(), "the third target is given up")
    eventually(lambda: "notify exit" in rules(run), "an alert about it")
    wait_until_nothing_is_left(run)  # the hub removes files as it ends
    files = [path for path in run.path.rglob("*") if path.is_file() and path.name != "notify.json"]
    assert not [path for path in files if b"/secret" in path.read_bytes()]


def test_targets_that_do_not_take_a_notice_say_why(server, monkeypatch, tmp_path):
    deliver(f'test "$FTMON_NOTICE_EVENT" = oom && cat > {tmp_path}/body', NOTICE)
    assert json.loads((tmp_path / "body").read_text())["title"] == "rank 0 out of memory"
    server.refusals = 1
    with pytest.raises(DeliveryError, match="answered 503"):
        deliver(server.address, NOTICE)
    with pytest.raises(DeliveryError, match="refused"):
        deliver("http://127.0.0.1:9/", NOTICE)
    with pytest.raises(DeliveryError) as error:
        deliver("http://alice:S3cretPw@127.0.0.1/", NOTICE)
    assert "S3cretPw" not in str(error.value)
    monkeypatch.setattr(notify, "COMMAND_SECONDS", 0.2)
    with pytest.raises(DeliveryError, match="was ended after"):
        deliver("sleep 60 & wait", NOTICE)


def test_a_server_that_speaks_no_http_is_reported_and_the_next_target_still_notified(monkeypatch, tmp_path):
    monkeypatch.setattr(notify, "TRY_AGAIN_SECONDS", ())
    failed: list[tuple[str, str]] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"SSH-2.0-x\r\n")
                connection.recv(65_536)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        targets = Notify([address, f"touch {tmp_path}/told"], ["oom"])
        notifier = Notifier(targets, "train-1", "node", lambda target, why: failed.append((target, why)))
        notifier.start()
        notifier.note(Alert(1, "oom", "error", time.time() + 1, "rank 0 out of memory"))
        notifier.close()
        thread.join(10)
    assert [target for target, _ in failed] == ["http://127.0.0.1"]
    assert (tmp_path / "told").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--notify", "https://"], "names no host"),
        (["--notify", "true", "--notify-on", "lunch"], "must be of finish"),
        (["--notify-on", "finish"], "needs --notify"),
    ],
)
def test_wrong_targets_and_events_are_refused_before_anything_starts(home, words, complaint):
    done = home.run("run", *words, "--", "true")
    assert (done.returncode, done.stderr.count("\n")) == (RUN_USAGE, 1)
    assert complaint in done.stderr
    assert home.runs() == []
