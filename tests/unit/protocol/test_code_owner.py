"""Whose code a file is: told by where it is installed, never by the name of a directory."""

import json
import sys
import threading
from importlib.metadata import Distribution, distributions
from pathlib import Path

import numpy
import pytest
from ftmon.protocol import code_owner
from ftmon.protocol.code_owner import editable_packages, is_probe, library_of, owner_of


@pytest.mark.parametrize(
    "path",
    ["/home/me/datasets/train.py", "/home/me/transformers/examples/pytorch/run_clm.py", "/home/me/deepspeed/train.py",
     "/home/me/ftmon/train.py", "/home/me/torch/model.py", "/home/me/trainer/probe/model.py",
     "C:\\work\\lightning\\train.py", "<stdin>"],
)  # fmt: skip
def test_a_script_in_a_directory_named_like_a_library_is_ones_own(path: str):
    assert owner_of(path) == ""
    assert not is_probe(path)


@pytest.mark.parametrize(
    ("path", "owner"),
    [("/env/lib/python3.11/site-packages/torch/nn/modules/module.py", "torch"),
     ("/usr/lib/python3/dist-packages/numpy/core.py", "numpy"), ("/env/lib/python3.11/site-packages/six.py", "six"),
     ("C:\\env\\Lib\\site-packages\\deepspeed\\runtime\\engine.py", "deepspeed"),
     ("/usr/lib/python3.11/threading.py", "python"), ("<frozen importlib._bootstrap>", "python"),
     ("<eval_with_key>.3", "python"), ("/pytorch/aten/src/ATen/native/Linear.cpp", "native"), ("??", "native"),
     ("", "native"), (code_owner.__file__, "ftmon"), ("/tmp/site/ftmon/trainer/recipe/train.py", "ftmon"),
     ("/tmp/site/deepspeed/runtime/zero/stage3.py", "deepspeed"),
     ("/home/me/transformers/src/transformers/models/llama/modeling_llama.py", "transformers"),
     ("/opt/pytorch/torch/optim/adamw.py", "torch"),
     ("/opt/lightning/src/lightning/pytorch/loops/fit_loop.py", "lightning")],
)  # fmt: skip
def test_what_is_installed_is_named_by_its_package(path: str, owner: str):
    assert owner_of(path) == owner


def test_real_modules_and_the_probes_wrappers_are_told_apart_by_their_package():
    assert library_of(numpy.__file__) == "numpy"
    assert library_of(threading.__file__) == "python"
    assert library_of(__file__) == ""
    here = Path(code_owner.__file__).resolve().parent.parent
    assert is_probe(str(here / "trainer" / "probe" / "hooks_torch.py"))
    assert is_probe(f"{sys.prefix}/lib/python3.11/site-packages/ftmon/trainer/probe/probe.py")
    assert not is_probe(str(here / "trainer" / "recipe" / "train.py"))


def test_a_checkout_that_is_installed_is_a_library_unless_it_is_the_project_itself(tmp_path: Path):
    site, checkout = tmp_path / "site", tmp_path / "Some Engine"
    (checkout / "src" / "some_engine").mkdir(parents=True)
    (checkout / "examples").mkdir()
    info = site / "some_engine-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-engine\nVersion: 1.0\n")
    (info / "direct_url.json").write_text(json.dumps({"url": checkout.as_uri(), "dir_info": {"editable": True}}))
    found = list(distributions(path=[str(site)]))
    packages = list(editable_packages(found, str(tmp_path / "elsewhere")))
    assert owner_of(f"{checkout}/src/some_engine/engine.py", packages) == "some_engine"
    assert owner_of(f"{checkout}/examples/train.py", packages) == ""
    assert list(editable_packages(found, f"{checkout}/examples")) == []


def test_a_damaged_installation_is_passed_over(tmp_path: Path):
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    for text in ("{", "[]", '{"dir_info": {"editable": true}}'):
        (info / "direct_url.json").write_text(text)
        found: list[Distribution] = list(distributions(path=[str(tmp_path)]))
        assert list(editable_packages(found, "/")) == []
