"""What a checkpoint folder says about itself, and which folders are checkpoints.

    <root>/step-00000050.g0003/        step 50, saved by generation 3
        manifest.json                  written last: the folder is a checkpoint if and only if it is here
        rank-00000.safetensors ...     each rank's owned part of every unit, by kind of state
        buffers.safetensors            the model's buffers, once

The folder is filled under a temporary name and renamed when its manifest stands; where nothing can be
renamed, it is filled in its place. File names are computed from the world size, never read from a file.
JSON only, and exactly as it was written: the manifest carries its own digest. Knows neither torch nor a
process group; the format is described in docs/checkpoint-format.md.

Where groups follow each other, a checkpoint is filled within the staging folder of its generation. Opening
the next one moves that folder away, and with it the path from which an older group could still commit: a
rename works or fails as a whole, so no check can come too early.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from re import compile as regex
from typing import Any

from zero_core.checkpoint.container import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_DIGITS,
    FORMAT,
    LEAST_BLOCK_BYTES,
    MODEL,
    digest,
    item_bytes,
)
from zero_core.checkpoint.store import Store, open_store
from zero_core.errors import CheckpointError, FencedError
from zero_core.layout import Layout, Slot, Unit

MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"
LATEST = "LATEST"
"""Names the checkpoint that was committed last: a hint for people. Nothing here reads it."""

SAVING = ".saving-"
"""What the names of folders begin with that are being filled, or deleted."""

_FOLDER = regex(r"step-(\d{8,})\.g(\d{4,})")
_STAGING = regex(r"\.generation-(\d{4,})")
_KIND = regex(r"[a-z][a-z0-9_]*")
_HEX = regex(f"[0-9a-f]{{{DIGEST_DIGITS}}}")

Place = str | Path | Store
"""A root, or a checkpoint's own folder: local, or of any store that fsspec knows."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the tensors.

    step     finished steps of data
    layout   the logical space and the cut at the saving world size
    kinds    kinds of state of each trainable unit, the master first; frozen ones have `container.MODEL`
    files    bytes, and the digest of the header, of each rank's file in order, and of the buffers' file
    buffers  name, dtype ("I64") and shape of each of the model's buffers
    aliases  first name of each parameter by its other names, where several are tied
    extra    what the caller wants back: JSON values
    created  Unix seconds
    updates  the optimizer's own count: steps without those that fp16 skipped
    loss_scale  state of the loss scaling; None but in fp16
    optimizer  its `kind`, settings, groups and schedule, as the saving engine was configured; None: unknown
    block_bytes  what has a digest of its own in the files; a power of two that chunks are multiples of
    seed, versions  what the caller tells: the job's seed, and releases of libraries by name
    """

    step: int
    generation: int
    stage: int
    precision: str
    layout: Layout
    kinds: tuple[str, ...]
    files: tuple[tuple[int, str], ...]
    extra: Mapping[str, Any]
    created: float
    updates: int
    buffers: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    loss_scale: Mapping[str, Any] | None = None
    seed: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    block_bytes: int = BLOCK_BYTES

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def bytes(self) -> int:
        """Of all files of tensors."""
        return sum(size for size, _ in self.files)

    def file(self, name: str) -> tuple[int, str]:
        """Bytes, and the digest of the header, of one of `expected_files`."""
        return self.files[expected_files(self.world_size).index(name)]

    def to_json(self) -> str:
        """One line, keys in order, its own digest among them. Raises CheckpointError for what is not JSON."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "layout"}
        values["layout"] = {
            "tile": self.layout.tile,
            "world_size": self.layout.world_size,
            "units": [
                {
                    "name": unit.name,
                    "trainable": unit.trainable,
                    "dtype": unit.dtype,
                    "slots": [[slot.name, slot.shape] for slot in unit.slots],
                }
                for unit in self.layout.units
            ],
        }
        values |= {"format": FORMAT, "chunk_bytes": CHUNK_BYTES}
        try:
            # Twice, because only then all keys are strings, which can be sorted.
            values = json.loads(json.dumps(values, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"the manifest of step {self.step} cannot be written as JSON ({error}): extra, seed and "
                "versions must be JSON values, without nan and inf"
            ) from error
        return _render({**values, "digest": digest(_render(values).encode())})

    @classmethod
    def from_json(cls, text: str, source: str) -> "Manifest":
        """Raises CheckpointError unless it is, to the byte, what `to_json` of some release wrote."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise CheckpointError(
                    f"{source} is of format {data['format']!r}, and this version reads {FORMAT!r} only: "
                    "load it with the release that wrote it"
                )
            told = data.pop("digest")
            if told != digest(_render(data).encode()) or text != _render({**data, "digest": told}):
                raise CheckpointError(f"{source} is not what its digest says: the manifest is damaged")
            return _checked(data, source)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{source} is not a checkpoint manifest: {error!r}") from error


def _render(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def _checked(data: Mapping[str, Any], source: str) -> Manifest:
    """The manifest, if everything in it can be: whoever wrote it made the digest fit as well."""

    def need(fits: bool, what: str, seen: object) -> None:
        if not fits:
            raise CheckpointError(f"{source}: {what}, not {seen!r:.80}")

    def count(value: Any, what: str, least: int = 0) -> int:
        if type(value) is not int or value < least:  # there are thousands: no text for those that fit
            need(False, f"{what} must be a whole number from {least} on", value)
        return int(value)

    def shape(value: Any) -> tuple[int, ...]:
        return tuple(count(size, "a size") for size in value)

    raw = data["layout"]
    units = tuple(_unit(unit, [(slot[0], shape(slot[1])) for slot in unit["slots"]]) for unit in raw["units"])
    layout = Layout(units, count(raw["tile"], "tile", 1), count(raw["world_size"], "world_size", 1))
    names = [slot.name for unit in units for slot in unit.slots]
    need(all(isinstance(name, str) for name in names), "names must be strings", names)
    need(len(set(names)) == len(names), "a parameter must be listed once", names)
    kinds = tuple(data["kinds"])
    fits = all(_KIND.fullmatch(kind) and kind != MODEL for kind in kinds) and len(set(kinds)) == len(kinds)
    need(fits, "kinds must be different words in small letters", kinds)
    files = tuple((count(size, "bytes of a file"), told) for size, told in data["files"])
    need(
        len(files) == layout.world_size + 1,
        f"{layout.world_size} ranks have as many files and one",
        len(files),
    )
    need(all(_HEX.fullmatch(told) for _, told in files), "digests have 32 hexadecimal digits", files)
    buffers = tuple((name, dtype, shape(sizes)) for name, dtype, sizes in data["buffers"])
    need(len({name for name, _, _ in buffers}) == len(buffers), "a buffer must be listed once", buffers)
    need(all(item_bytes(dtype) for _, dtype, _ in buffers), "dtypes must be known", buffers)
    need(data["chunk_bytes"] == CHUNK_BYTES, f"chunks have {CHUNK_BYTES} bytes", data["chunk_bytes"])
    block = count(data["block_bytes"], "block_bytes", LEAST_BLOCK_BYTES)
    need(block <= CHUNK_BYTES and block.bit_count() == 1, "block_bytes must be a power of two", block)
    need(all(type(unit["trainable"]) is bool for unit in raw["units"]), "trainable is true or false", units)
    need(data["precision"] in ("fp32", "bf16", "fp16"), "precision must be known", data["precision"])
    aliases = dict(data["aliases"])
    need(set(aliases.values()) <= set(names), "aliases must be of parameters that are there", aliases)
    return Manifest(
        step=count(data["step"], "step"),
        generation=count(data["generation"], "generation"),
        stage=count(data["stage"], "stage"),
        precision=data["precision"],
        layout=layout,
        kinds=kinds,
        files=files,
        extra=dict(data["extra"]),
        created=float(data["created"]),
        updates=count(data["updates"], "updates"),
        buffers=buffers,
        aliases=aliases,
        loss_scale=None if data["loss_scale"] is None else dict(data["loss_scale"]),
        seed=data["seed"],
        versions=dict(data["versions"]),
        optimizer=None if data.get("optimizer") is None else dict(data["optimizer"]),
        block_bytes=block,
    )


def _unit(raw: Mapping[str, Any], parameters: Sequence[tuple[str, tuple[int, ...]]]) -> Unit:
    """Parameters lie one behind the other in their unit, which is why the manifest has no offsets."""
    slots: list[Slot] = []
    for name, shape in parameters:
        slots.append(Slot(name, shape, slots[-1].stop if slots else 0))
    return Unit(str(raw["name"]), bool(raw["trainable"]), str(raw["dtype"]), tuple(slots))


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One committed checkpoint as listed: `bytes` of its tensor files, `created` in Unix seconds.

    location  its folder: a path, or a URI in a remote store
    """

    step: int
    generation: int
    location: str
    bytes: int
    created: float
    world_size: int
    stage: int

    @classmethod
    def of(cls, manifest: Manifest, location: str) -> "CheckpointInfo":
        """Of the checkpoint in that folder, as its manifest has it."""
        return cls(
            step=manifest.step,
            generation=manifest.generation,
            location=location,
            bytes=manifest.bytes,
            created=manifest.created,
            world_size=manifest.world_size,
            stage=manifest.stage,
        )

    @property
    def name(self) -> str:
        return folder_name(self.step, self.generation)

    @property
    def path(self) -> Path:
        """Of a local one. Raises CheckpointError for a remote one: use `location`."""
        return local_path(self.location)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A committed checkpoint that cannot be loaded, by its folder's name, and `what` is wrong with it."""

    step: int
    generation: int
    location: str
    what: str


def local_path(location: str) -> Path:
    """A local folder's path. Raises CheckpointError for a URI."""
    if "://" in location:
        raise CheckpointError(f"{location} is in a remote store: it has a location, and no path")
    return Path(location)


def folder_name(step: int, generation: int) -> str:
    """Of a checkpoint, below its root. Raises CheckpointError for a name that none could have."""
    if step < 0 or generation < 0:
        raise CheckpointError(f"step {step} of generation {generation}: neither can be negative")
    return f"step-{step:08d}.g{generation:04d}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Step and generation of a checkpoint's folder; None if it is not the name of one."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def is_committed(store: Store, name: str) -> bool:
    """Whether that folder of the store is a checkpoint's that was committed, be it damaged."""
    return store.size(f"{name}/{MANIFEST}") is not None


def shard_name(rank: int) -> str:
    """File of one rank's owned ranges."""
    return f"rank-{rank:05d}.safetensors"


def expected_files(world_size: int) -> list[str]:
    """Names of all files beside the manifest, in the order of `Manifest.files`."""
    return [*(shard_name(rank) for rank in range(world_size)), BUFFERS]


def read(folder: Place) -> Manifest:
    """The manifest of a committed checkpoint, with every file present in the size it was written.

    Raises CheckpointError if the manifest is damaged, of another format, or a file is not as large as said.
    What is in the files is checked when it is read.
    """
    store = open_store(folder)
    source = store.location(MANIFEST)
    try:
        manifest = Manifest.from_json(store.read(MANIFEST).decode(), source)
        sizes = store.sizes()
    except OSError as error:
        raise CheckpointError(f"{folder} is not a committed checkpoint: {error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not a checkpoint manifest: {error}") from error
    for name, (size, _) in zip(expected_files(manifest.world_size), manifest.files, strict=True):
        if sizes.get(name) != size:
            raise CheckpointError(
                f"{store.location(name)} has {sizes.get(name)} bytes where the manifest says {size}: "
                "the checkpoint is damaged; load an older one"
            )
    return manifest


def committed(root: Place) -> dict[tuple[int, int], str]:
    """Names of all checkpoints under `root`, whole or not, by step and generation, the oldest first."""
    store = open_store(root)
    found = {parsed: name for name in store.names() if (parsed := parse_name(name)) is not None}
    return {parsed: found[parsed] for parsed in sorted(found) if is_committed(store, found[parsed])}


def survey(root: Place) -> tuple[list[CheckpointInfo], list[Unusable]]:
    """What was committed under `root`, oldest first: what could be loaded, and what could not.

    Of one step saved twice, the newer generation. Bits are not looked at.
    """
    store = open_store(root)
    newest: dict[int, CheckpointInfo] = {}
    unusable = []
    for (step, generation), name in committed(store).items():
        location = store.location(name)
        try:
            manifest = read(location)
        except (CheckpointError, OSError) as error:
            if is_committed(store, name):  # it is not just being deleted
                unusable.append(Unusable(step, generation, location, str(error)))
            continue
        if (manifest.step, manifest.generation) != (step, generation):
            says = folder_name(manifest.step, manifest.generation)
            unusable.append(Unusable(step, generation, location, f"it says that it is {says}: a copy"))
            continue
        newest[step] = CheckpointInfo.of(manifest, location)
    return [newest[step] for step in sorted(newest)], unusable


def scan(root: Place) -> list[CheckpointInfo]:
    """The committed checkpoints under `root` that could be loaded: see `survey`."""
    return survey(root)[0]


def latest(root: Place) -> CheckpointInfo | None:
    """The newest committed checkpoint, if there is one."""
    found = scan(root)
    return found[-1] if found else None


def staging_name(generation: int) -> str:
    """The folder under the root where a generation fills its checkpoints before they are committed."""
    return f".generation-{generation:04d}"


def staging(root: Path, generation: int) -> Path:
    """The same, of a local root."""
    return root / staging_name(generation)


def opened(root: Place) -> int:
    """The newest generation that was opened under `root`; 0 if none was."""
    found = [int(match[1]) for name in open_store(root).names() if (match := _STAGING.fullmatch(name))]
    return max(found, default=0)


def open_generation(root: Place, generation: int) -> None:
    """Let this generation commit checkpoints under `root`, and no older one any more.

    Where nothing can be renamed, a commit that is under way at this moment may still succeed.
    Raises FencedError if a newer one has been opened: then it is this one that is of the past.
    """
    store = open_store(root)
    if (newest := opened(store)) > generation:
        raise FencedError(
            f"generation {generation} may commit nothing to {root}: generation {newest} has begun"
        )
    own = staging_name(generation)
    if store.moves:
        with suppress(FileExistsError):
            store.make_folder(own)
    else:
        store.write(f"{own}/open", b"open")  # a store of objects has no empty folders
    for name in store.names():
        match = _STAGING.fullmatch(name)
        if match and int(match[1]) < generation:
            away = f"{SAVING}closed-{name.removeprefix('.')}" if store.moves else name
            if store.moves:
                store.rename(name, away)
            store.remove_tree(away)


def clear_unfinished(root: Place) -> list[str]:
    """Delete what saves that were cut off, and deletions, left. Returns the names of the folders that went.

    To be called when nobody saves under `root` any more. What is committed stays, and so do the generations'
    folders, empty: they say which one was opened last. What lies there is moved away first, so that whoever
    is still writing after all puts nothing into it.
    """
    store = open_store(root)
    doomed = []
    for name in store.names():
        if _STAGING.fullmatch(name) and store.moves:
            for inside in store.names(name):
                if inside.startswith(SAVING):
                    store.rename(f"{name}/{inside}", inside)
                    doomed.append(inside)
        elif name.startswith(SAVING) or (parse_name(name) and not is_committed(store, name)):
            doomed.append(name)
    for name in doomed:
        store.remove_tree(name)
    return doomed


def prune(root: Place, *, keep: int, keep_every: int | None = None, sound: str | None = None) -> list[str]:
    """Delete old checkpoints and what interrupted saves left. Returns the names of the folders that went.

    sound  the folder's name of one whose bits are known to be right: just written, or verified

    Kept are the newest `keep` and those of every step that is a multiple of `keep_every`; so the newest one
    whose manifest holds and whose files have their sizes always is. Bits are not looked at: newer ones may be
    damaged, so `sound` is kept whatever there is. One that is seen to be damaged goes when it is older than
    all of these. To be called when no save is under way but within a generation's staging folder. The
    manifest goes first, so that a deletion that is interrupted leaves no checkpoint with parts missing.
    """
    if keep < 1:
        raise CheckpointError(f"keep {keep} must be at least 1: the newest checkpoint is never deleted")
    if keep_every is not None and keep_every < 1:
        raise CheckpointError(f"keep_every {keep_every} must be at least 1, or None")
    store = open_store(root)
    whole = scan(store)
    newest = whole[-keep:]
    spared = {info.name for info in newest}
    spared |= {sound} if sound is not None else set()
    spared |= {info.name for info in whole if keep_every is not None and info.step % keep_every == 0}
    doomed = []
    for name in store.names():
        if name.startswith(SAVING):
            doomed.append(name)
            continue
        parsed = parse_name(name)
        if parsed is None or name in spared:
            continue
        if _may_go(store, name, parsed, whole, newest, keep_every):
            doomed.append(name)
    for name in doomed:
        store.remove(f"{name}/{MANIFEST}")
        store.remove_tree(name)
    return doomed


def _may_go(
    store: Store,
    name: str,
    parsed: tuple[int, int],
    whole: Sequence[CheckpointInfo],
    newest: Sequence[CheckpointInfo],
    keep_every: int | None,
) -> bool:
    """Whether a folder that is not to be kept may be deleted."""
    step, _ = parsed
    older = any(step < info.step for info in newest[:1])
    if not is_committed(store, name):
        return older or store.moves  # no save is under way there, so it is what a deletion left
    if any(info.step == step for info in whole):
        return True  # whole and too old, or saved again by another generation
    return older and not (keep_every is not None and step % keep_every == 0)
