"""Checkpoints: written at one N and stage, loaded at any other, committed or invisible.

Names are re-exported lazily: `manifest`, `container` and `store` load no torch.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "SavedCheckpoint": "zero_core.checkpoint.saving",
    "Outcome": "zero_core.checkpoint.saving",
    "Saver": "zero_core.checkpoint.saving",
    "save": "zero_core.checkpoint.saving",
    "load": "zero_core.checkpoint.loading",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zero_core.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
