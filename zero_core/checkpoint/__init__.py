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
    "Loaded": "zero_core.checkpoint.loading",
    "load": "zero_core.checkpoint.loading",
    "load_newest": "zero_core.checkpoint.loading",
    "export_model": "zero_core.checkpoint.interchange",
    "import_model": "zero_core.checkpoint.interchange",
    "Damage": "zero_core.checkpoint.inspection",
    "Difference": "zero_core.checkpoint.inspection",
    "verify": "zero_core.checkpoint.inspection",
    "diff": "zero_core.checkpoint.inspection",
    "dry_run": "zero_core.checkpoint.inspection",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zero_core.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
