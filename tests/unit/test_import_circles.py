"""No module imports itself through others, type-checking imports included: every module can be read on its own."""

from graphlib import TopologicalSorter

import grimp


def test_no_imports_go_round_in_a_circle() -> None:
    graph = grimp.build_graph("ftmon", exclude_type_checking_imports=False, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 250
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules
