"""The ZeRO engine: torch and little else, usable under plain `torchrun`.

Names are re-exported lazily, so that the arithmetic (`layout`, `budget`, `manifest`, `config`) can be
imported by processes that must not load torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ZeroEngine": "zero_core.engine",
    "StepReport": "zero_core.report",
    "ZeroConfig": "zero_core.config",
    "AdamWConfig": "zero_core.config",
    "AdamConfig": "zero_core.config",
    "SGDConfig": "zero_core.config",
    "ParameterGroup": "zero_core.config",
    "ScheduleConfig": "zero_core.config",
    "LossScale": "zero_core.config",
    "MemoryReport": "zero_core.memory",
    "ZeroError": "zero_core.errors",
    "full_state_dict": "zero_core.state_dict",
    "load_full_state_dict": "zero_core.state_dict",
    "sharded_state_dict": "zero_core.state_dict",
    "load_sharded_state_dict": "zero_core.state_dict",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zero_core' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
