"""After a kill the processes' GPU memory is free again, and the result says what was looked at."""

import os
import signal

import pynvml
import pytest
from ftmon.protocol.messages.telemetry import Step
from hub_client import App, exit_of, fake_ranks, members, started

GIB = 2**30


def used_bytes() -> int:
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    finally:
        pynvml.nvmlShutdown()


try:
    used_bytes()
except pynvml.NVMLError:
    pytestmark = [pytest.mark.gpu, pytest.mark.skip(reason="no NVIDIA GPU here")]
else:
    pytestmark = [pytest.mark.gpu, pytest.mark.gpu_alone]


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped by SIGSTOP"])
def test_gpu_memory_is_free_after_a_kill(stopped, tmp_path, monkeypatch):
    monkeypatch.setenv("FTMON_HOME", str(tmp_path / "home"))
    before = used_bytes()
    with started(fake_ranks({"gpu_bytes": 4 * GIB})) as run, App(run) as app:
        app.wait_for(Step, seconds=120)
        assert used_bytes() > before + 4 * GIB
        if stopped:
            os.kill(app.hellos()[0].pid, signal.SIGSTOP)
        result = app.command("kill")
        assert result.ok, result.text
        assert "memory in use went from" in result.text
        assert members(run) == []
        assert used_bytes() < before + GIB // 2
        assert exit_of(run).state == "stopped"
