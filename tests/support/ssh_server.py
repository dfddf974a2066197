"""An SSH server on this host, for tests of what goes through OpenSSH's client."""

import asyncio
import contextlib
import getpass
import shlex
import threading
from pathlib import Path
from typing import Any, Self

import asyncssh


class SshServer(asyncssh.SSHServer):
    """Serves from a thread of its own: commands run in a shell as the tests' user, UNIX sockets are forwarded."""

    def __init__(self, folder: Path) -> None:
        self.forwards = True  # whether it forwards UNIX sockets
        key = asyncssh.generate_private_key("ssh-ed25519")
        self._host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._key_file = folder / "id_ed25519"
        key.write_private_key(self._key_file)
        self._key_file.chmod(0o600)
        self._allowed = asyncssh.import_authorized_keys(key.export_public_key().decode())
        self._loop = asyncio.new_event_loop()
        self._commands: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ssh server", daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"ssh://{getpass.getuser()}@127.0.0.1:{self.port}"

    @property
    def client(self) -> str:
        options = ["-F", "none", "-i", str(self._key_file), "-o", "StrictHostKeyChecking=no"]
        return shlex.join(["ssh", *options, "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=INFO"])

    def __enter__(self) -> Self:
        self._thread.start()
        self._acceptor = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(200)
        self.port = self._acceptor.get_port()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(200)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(200)
        self._loop.close()

    def unix_connection_requested(self, dest_path: str) -> bool:
        return self.forwards

    async def _listen(self) -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            *("127.0.0.1", 0),
            server_factory=lambda: self,
            server_host_keys=[self._host_key],
            authorized_client_keys=self._allowed,
            process_factory=self._run,
            encoding=None,
        )

    async def _close(self) -> None:
        self._acceptor.close()
        await self._acceptor.wait_closed()
        if self._commands:
            await asyncio.wait(self._commands, timeout=10)

    async def _run(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        task = asyncio.create_task(_run(process))
        self._commands.add(task)
        await task
        self._commands.discard(task)


async def _run(process: "asyncssh.SSHServerProcess[bytes]") -> None:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    child = await asyncio.create_subprocess_shell(process.command or "true", **pipes)
    assert child.stdout is not None
    assert child.stderr is not None
    receiving = asyncio.create_task(_copy(process.stdin, child.stdin))
    await asyncio.gather(_copy(child.stdout, process.stdout), _copy(child.stderr, process.stderr))
    status = await child.wait()
    receiving.cancel()
    child.stdin.close()  # otherwise the transport is open when the loop is closed
    process.exit(status)


async def _copy(source: Any, sink: Any) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(1 << 16):
            sink.write(data)
    if isinstance(sink, asyncio.StreamWriter):
        sink.close()
