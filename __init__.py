"""ftmon: a DeepSpeed trainer and a live terminal monitor of it.

The public API is lazy (PEP 562): importing ``ftmon`` imports neither torch nor textual.

* ``ftmon.watch(engine)`` reports a training engine, or a plain PyTorch optimizer, to the monitor.
* ``%load_ext ftmon`` reports a notebook: each cell's forward and backward, and its steps.
* ``ftmon.Callback`` is a Hugging Face ``TrainerCallback`` that does the same for a ``Trainer``.
* ``ftmon.FtmonError`` is the root of every error ftmon raises on purpose.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol.errors import FtmonError
    from .trainer.probe.start.watch import Callback, watch

__version__ = "0.1.0"
__all__ = ["Callback", "FtmonError", "__version__", "watch"]

_LAZY = {
    "Callback": ("ftmon.trainer.probe.start.watch", "Callback"),
    "FtmonError": ("ftmon.protocol.errors", "FtmonError"),
    "load_ipython_extension": ("ftmon.trainer.probe.start.watch", "load_ipython_extension"),
    "watch": ("ftmon.trainer.probe.start.watch", "watch"),
}


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is asked for."""
    try:
        module, attribute = _LAZY[name]
    except KeyError:
        raise AttributeError(f"module 'ftmon' has no attribute {name!r}") from None
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """Name the lazy attributes too."""
    return sorted({*globals(), *__all__})
