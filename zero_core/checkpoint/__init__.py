"""Checkpoints on disk: written at one N and stage, loaded at any other, committed or invisible."""

from zero_core.checkpoint.loading import load
from zero_core.checkpoint.saving import SavedCheckpoint, save

__all__ = ["SavedCheckpoint", "load", "save"]
