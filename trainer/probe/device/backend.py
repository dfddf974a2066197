"""The backend of ``torch.distributed``."""

import sys
from typing import Any


def backend_of(device: str) -> str:
    """Return the default process group's backend, empty without a group.

    A group made without a named backend has one for each kind of device: then that of ``device`` (``cuda``, ``cpu``).
    """
    distributed: Any = sys.modules.get("torch.distributed")
    try:
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return ""
        backend = str(distributed.get_backend())
        if backend not in ("undefined", "custom"):
            return backend
        pairs = [pair.partition(":") for pair in str(distributed.get_backend_config()).split(",")]
        by_device = {kind: name for kind, _, name in pairs}
        return by_device.get(device) or next(iter(by_device.values()), "")
    except (RuntimeError, ValueError, AttributeError):
        return ""
