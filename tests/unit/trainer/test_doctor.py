"""What the training side's doctor says, whatever is there."""

import os
import time
from collections.abc import Iterator

import pytest
from ftmon.protocol import checks
from ftmon.trainer import doctor


def names(checks: list[doctor.Check]) -> dict[str, doctor.Check]:
    return {check.name: check for check in checks}


@pytest.mark.parametrize(
    ("setting", "state", "remedy"),
    [
        (None, "ok", ""),
        (" ", "ok", ""),
        ("8.0;9.0+PTX", "ok", ""),
        ("8.0 9.0", "ok", ""),
        ("9.0a", "warning", "export TORCH_CUDA_ARCH_LIST='9.0'"),
        ("8.0;10.0a+PTX", "warning", "export TORCH_CUDA_ARCH_LIST='8.0;10.0+PTX'"),
        ("Hopper", "warning", "unset TORCH_CUDA_ARCH_LIST"),
    ],
)
def test_an_architecture_list_that_deepspeed_cannot_read_gets_a_correction(setting, state, remedy):
    check = doctor.arch_list(setting)
    assert (check.state, check.remedy) == (state, remedy)


@pytest.mark.parametrize(
    ("library", "version", "state", "text"),
    [
        ("torch", "2.5.1", "warning", "2.5.1, older than the oldest tested version, 2.7"),
        ("torch", "2.6.0", "ok", "2.6.0: ftmon run was tested with it (oldest: 2.6), ftmon's own trainer from 2.7 on"),
        ("torch", "2.7.0rc1", "ok", "2.7.0rc1 (tested: 2.7 to 2.14)"),
        ("torch", "2.14.1+cu130", "ok", "2.14.1+cu130 (tested: 2.7 to 2.14)"),
        ("torch", "2.15.0.dev20261101", "warning", "2.15.0.dev20261101, newer than the newest tested version, 2.14"),
        ("deepspeed", "0.19.8", "ok", "0.19.8 (tested: 0.19.8)"),
        ("deepspeed", "0.19.9", "warning", "0.19.9, newer than the newest tested version, 0.19.8"),
        ("peft", "0.1", "ok", "0.1"),
    ],
)
def test_versions_outside_the_tested_ones_are_warned_of(monkeypatch, library, version, state, text):
    tested = {"torch": ("2.7", "2.14"), "deepspeed": ("0.19.8", "0.19.8")}
    monkeypatch.setattr(checks, "tested_versions", lambda: tested)
    monkeypatch.setattr(checks, "watched_versions", lambda: {"torch": "2.6"})
    check = checks.version_check(library, version)
    assert (check.state, check.text) == (state, text)


def test_the_table_of_tested_versions_is_in_order_and_a_check_that_breaks_is_a_finding(monkeypatch):
    tested = checks.tested_versions()
    assert {"torch", "transformers", "deepspeed"} <= tested.keys()
    parts = checks.version_parts
    assert all(parts(oldest) <= parts(newest) for oldest, newest in tested.values())
    assert all(parts(watched) <= parts(tested[name][0]) for name, watched in checks.watched_versions().items())

    def broken() -> Iterator[doctor.Check]:
        yield doctor.Check("first", "ok", "fine")
        raise RuntimeError("libcuda is of another world\nand more")

    monkeypatch.setattr(doctor, "_ALL", (broken,))
    first, second = doctor.examine()
    assert first.name == "first"
    assert (second.name, second.state) == ("broken", "error")
    assert second.text == "cannot be checked: libcuda is of another world"


def test_missing_packages_are_findings_and_break_nothing(monkeypatch):
    def nothing(name: str) -> str:
        raise doctor.metadata.PackageNotFoundError(name)

    def unimportable(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    monkeypatch.setattr(doctor.metadata, "version", nothing)
    monkeypatch.setattr(doctor, "import_module", unimportable)
    monkeypatch.setattr(doctor, "_output", lambda command: "")
    found = names(doctor.examine())
    assert found["torch"].state == found["deepspeed"].state == "error"
    assert (found["torch"].remedy, found["peft"].state) == (doctor.INSTALL, "warning")
    assert found["shared memory"].text


def test_without_compiler_and_ninja_or_with_little_shared_memory_there_are_remedies(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("torch").version, "cuda", None)  # or nvcc is run
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    found = names(list(doctor.op_builder()))
    assert found["compiler"].state == found["ninja"].state == "warning"
    assert found["ninja"].remedy == "pip install ninja"

    class Small:
        f_blocks, f_frsize, f_bavail = 16384, 4096, 16000

    monkeypatch.setattr(doctor.os, "statvfs", lambda path: Small())
    assert names(list(doctor.limits()))["shared memory"].remedy.startswith("start the container with --shm-size")


def test_a_lock_that_a_killed_build_left_is_found(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert [check.state for check in doctor.extension_locks()] == ["ok"]
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert [check.state for check in doctor.extension_locks()] == ["ok"], "it is being built, perhaps"
    os.utime(lock, (time.time() - 3600, time.time() - 3600))
    (found,) = doctor.extension_locks()
    assert (found.state, found.remedy) == ("warning", f"if nothing is being built: rm {lock}")
