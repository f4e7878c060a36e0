"""What a checkpoint folder says about itself, and which folders are checkpoints.

    <root>/step-00000050.g0003/        step 50, saved by generation 3
        manifest.json                  written last: the folder is a checkpoint if and only if it is here
        rank-00000.safetensors ...     each rank's owned part of every unit, by kind of state
        buffers.safetensors            the model's buffers, once

The folder is filled under a temporary name and renamed when its manifest stands. File names are computed
from the world size, never read from a file. JSON only; knows neither torch nor a process group.

Where groups follow each other, a checkpoint is filled within the staging folder of its generation. Opening
the next one moves that folder away, and with it the path from which an older group could still commit: a
rename works or fails as a whole, so no check can come too early.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from re import compile as regex
from typing import Any

from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import Layout, Slot, Unit

FORMAT = "elastic-zero/1"
MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"

_FOLDER = regex(r"step-(\d{8,})\.g(\d{4,})")
_STAGING = regex(r"\.generation-(\d{4,})")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the tensors.

    step     finished steps of data
    layout   the logical space and the cut at the saving world size
    files    bytes of each file, by its computed name
    extra    what the caller wants back: JSON values
    created  Unix seconds
    updates  the optimizer's own count: steps without those that fp16 skipped. None in manifests from before
             there was one: as many as steps
    states   kinds of optimizer state for each trainable unit
    loss_scale  state of the loss scaling; None but in fp16
    """

    step: int
    generation: int
    stage: int
    precision: str
    layout: Layout
    files: Mapping[str, int]
    extra: Mapping[str, Any]
    created: float
    updates: int | None = None
    states: tuple[str, ...] = ("master", "momentum", "variance")
    loss_scale: Mapping[str, Any] | None = None

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, source: Path) -> "Manifest":
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise CheckpointError(f"{source} is not of format {FORMAT}: this version cannot read it")
            layout = data.pop("layout")
            units = tuple(
                Unit(
                    unit["name"],
                    unit["trainable"],
                    unit["dtype"],
                    tuple(Slot(s["name"], tuple(s["shape"]), s["offset"]) for s in unit["slots"]),
                )
                for unit in layout["units"]
            )
            if "states" in data:
                data["states"] = tuple(data["states"])
            return cls(layout=Layout(units, layout["tile"], layout["world_size"]), **data)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{source} is not a checkpoint manifest: {error!r}") from error


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint as listed: `bytes` of its tensor files, `created` in Unix seconds."""

    step: int
    generation: int
    path: Path
    bytes: int
    created: float
    world_size: int
    stage: int


def folder_name(step: int, generation: int) -> str:
    return f"step-{step:08d}.g{generation:04d}"


def shard_name(rank: int) -> str:
    """File of one rank's owned ranges."""
    return f"rank-{rank:05d}.safetensors"


def read(folder: Path) -> Manifest:
    """The manifest of a committed checkpoint, with every file present in the size it was written."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.from_json(path.read_text(encoding="utf-8"), path)
    except OSError as error:
        raise CheckpointError(f"{folder} is not a committed checkpoint: {error}") from error
    for name in expected_files(manifest.world_size):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != manifest.files.get(name):
            raise CheckpointError(
                f"{folder / name} has {size} bytes where the manifest says {manifest.files.get(name)}: "
                "the checkpoint is damaged; load an older one"
            )
    return manifest


def expected_files(world_size: int) -> list[str]:
    """Names of all files beside the manifest."""
    return [*(shard_name(rank) for rank in range(world_size)), BUFFERS]


def scan(root: Path) -> list[CheckpointInfo]:
    """The committed checkpoints under `root`, oldest first; of one step saved twice, the newer generation."""
    newest: dict[int, CheckpointInfo] = {}
    for folder in _children(root):
        match = _FOLDER.fullmatch(folder.name)
        if not match or not (folder / MANIFEST).is_file():
            continue
        try:
            manifest = read(folder)
        except (CheckpointError, OSError):
            continue  # damaged, or being deleted: not one that could be loaded
        info = CheckpointInfo(
            step=manifest.step,
            generation=manifest.generation,
            path=folder,
            bytes=sum(manifest.files.values()),
            created=manifest.created,
            world_size=manifest.world_size,
            stage=manifest.stage,
        )
        if info.step not in newest or newest[info.step].generation < info.generation:
            newest[info.step] = info
    return [newest[step] for step in sorted(newest)]


def latest(root: Path) -> CheckpointInfo | None:
    """The newest committed checkpoint, if there is one."""
    found = scan(root)
    return found[-1] if found else None


def staging(root: Path, generation: int) -> Path:
    """Where a generation fills its checkpoints before they are committed."""
    return root / f".generation-{generation:04d}"


def opened(root: Path) -> int:
    """The newest generation that was opened under `root`; 0 if none was."""
    found = [int(match[1]) for p in _children(root) if (match := _STAGING.fullmatch(p.name))]
    return max(found, default=0)


def open_generation(root: Path, generation: int) -> None:
    """Let this generation commit checkpoints under `root`, and no older one any more.

    Raises FencedError if a newer one has been opened: then it is this one that is of the past.
    """
    if (newest := opened(root)) > generation:
        raise FencedError(
            f"generation {generation} may commit nothing to {root}: generation {newest} has begun"
        )
    staging(root, generation).mkdir(parents=True, exist_ok=True)
    for folder in _children(root):
        match = _STAGING.fullmatch(folder.name)
        if match and int(match[1]) < generation:
            away = root / f".saving-closed-{folder.name.removeprefix('.')}"
            folder.rename(away)
            shutil.rmtree(away, ignore_errors=True)


def prune(root: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints and what interrupted saves left. Returns what went.

    The manifest goes first, so that a deletion that is interrupted leaves no checkpoint with parts missing.
    """
    if keep < 1:
        raise CheckpointError(f"keep {keep} must be at least 1: the newest checkpoint is never deleted")
    kept = {info.path for info in scan(root)[-keep:]}
    doomed = [
        folder
        for folder in _children(root)
        if folder not in kept and (_FOLDER.fullmatch(folder.name) or folder.name.startswith(".saving-"))
    ]
    for folder in doomed:
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
    return doomed


def _children(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []
