"""Makes the start of every process of the tests cheaper; their PYTHONPATH begins with this folder.

Imports are most of the suite's processor time: 2 to 3 s for each of 200 processes.

- Garbage collection is rarer than imports make objects: otherwise it takes a third of the time of a rank that trains a
  few steps.
- transformers reads its 1,700 files twice at each start for a table of names (0.5 s): cached.
- ``dataclasses`` compiles the methods of 1,000 classes of torch and what comes with it (0.25 s): cached.
- PyTorch asks ``inspect`` where its operators are registered, which looks through all modules (0.3 s): not asked.
- Every optimizer imports ``torch._dynamo``, the front end of ``torch.compile`` (1 s): where that is disabled, it is
  imported when something is used that does more than mark code for it (``lazy_dynamo``). ``torch.compile``, which
  DeepSpeed's Muon and bitsandbytes call in every rank, returns the function, as it would after that import.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(1_000_000, 50, 1000)
atexit.register(gc.freeze)

_AFTER = {
    "torch.version": "cache_dataclass_methods",
    "torch._library.utils": "speed_up_get_source",
    "torch.library": "speed_up_getmodule",
    "torch._meta_registrations": "compile_nothing_where_disabled",
    "transformers.utils.import_utils": "cache_import_structure",
}
"""Names of functions in ``import_caches``, each called with a module once that is imported. ``torch`` itself and what
the probe's own hooks await are not among them: of two finders one would not be asked."""


class _PostImportHooks:
    def find_spec(self, fullname, path, target=None):
        if fullname.startswith("torch._dynamo") and (
            os.environ.get("TORCHDYNAMO_DISABLE") == "1" or "lazy_dynamo" in sys.modules
        ):
            return _support("lazy_dynamo").find_spec(fullname, path)
        name = _AFTER.pop(fullname, "")
        if not name:
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            real, call = spec.loader.exec_module, getattr(_support("import_caches"), name)

            def exec_module(module):
                real(module)
                call(module)

            spec.loader.exec_module = exec_module
        return spec


def _support(name):
    """Import a module beside this one, also where this folder has left ``sys.path``, as in xdist's workers."""
    from importlib.util import module_from_spec, spec_from_file_location

    if name not in sys.modules:
        spec = spec_from_file_location(name, __file__.replace("sitecustomize", name))
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


sys.meta_path.insert(0, _PostImportHooks())
