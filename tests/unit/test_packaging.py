"""What ships is what is meant to, importing ftmon stays light, and no module imports itself through others."""

import tomllib
from graphlib import TopologicalSorter

import grimp
from places import ROOT


def test_the_list_of_packages_is_that_on_disk_and_every_module_lies_in_one_of_them():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"ftmon"}
    for top in ("protocol", "trainer", "tui"):
        found |= {
            ".".join(("ftmon", *path.parent.relative_to(ROOT).parts)) for path in (ROOT / top).rglob("__init__.py")
        }
    assert sorted(listed) == sorted(found)
    for top in ("protocol", "trainer", "tui"):
        for path in (ROOT / top).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), f"{path} is in no package and would not ship"
    assert [path.name for path in ROOT.glob("[!.]*.py")] == ["__init__.py"]


def test_no_imports_go_round_in_a_circle() -> None:
    graph = grimp.build_graph("ftmon", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 250
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
