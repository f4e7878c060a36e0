"""Checkpoints written by hand, from bytes: what the readers are tested with, apart from what saves them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zero_core.checkpoint import manifest as manifests
from zero_core.checkpoint.container import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Contents,
    Digests,
    buffer_contents,
    digest,
    header,
    item_bytes,
    kind_dtype,
    kinds_of,
    rank_contents,
)
from zero_core.checkpoint.manifest import Manifest
from zero_core.layout import Layout

States = dict[tuple[str, int], bytes]


def make(layout: Layout, **changes: Any) -> Manifest:
    values: dict[str, Any] = {
        "step": 3,
        "generation": 1,
        "stage": 2,
        "precision": "bf16",
        "kinds": ("master", "momentum", "variance"),
        "files": (),
        "extra": {},
        "created": 5.0,
        "updates": 3,
        **changes,
    }
    return Manifest(layout=layout, **values)


def random_states(manifest: Manifest, seed: int = 5) -> States:
    """The whole logical space, as bytes."""
    rng = np.random.default_rng(seed)
    return {
        (kind, index): rng.bytes(unit.numel * item_bytes(kind_dtype(manifest, index, kind)))
        for index, unit in enumerate(manifest.layout.units)
        for kind in kinds_of(manifest, index)
    }


def data_of(manifest: Manifest, states: States, rank: int) -> bytes:
    """The data section of one rank's file."""
    parts = []
    for entry in rank_contents(manifest, rank).entries:
        kind, _, unit = entry.name.partition("/")
        start, stop = manifest.layout.owned(int(unit), rank)
        size = item_bytes(entry.dtype)
        parts.append(states[kind, int(unit)][start * size : stop * size])
    return b"".join(parts)


def write(root: Path, manifest: Manifest, states: States, buffers: Mapping[str, bytes] | None = None) -> Path:
    """Commit a checkpoint; returns its folder."""
    folder = root / manifests.folder_name(manifest.step, manifest.generation)
    folder.mkdir(parents=True)
    layout = manifest.layout
    files = [
        _file(
            folder / manifests.shard_name(rank),
            rank_contents(manifest, rank),
            data_of(manifest, states, rank),
        )
        for rank in range(layout.world_size)
    ]
    contents = buffer_contents(manifest.buffers, manifest.block_bytes)
    data = b"".join((buffers or {})[entry.name] for entry in contents.entries)
    files.append(_file(folder / manifests.BUFFERS, contents, data))
    values = {name: getattr(manifest, name) for name in Manifest.__slots__ if name != "layout"}
    whole = Manifest(**{**values, "layout": layout, "files": tuple(files)})
    (folder / manifests.MANIFEST).write_text(whole.to_json())
    return folder


def digests_of(data: bytes, block_bytes: int = BLOCK_BYTES) -> Digests:
    """Of a data section."""
    return Digests(
        *(
            "".join(digest(data[start : start + size]) for start in range(0, len(data), size))
            for size in (CHUNK_BYTES, block_bytes)
        )
    )


def _file(path: Path, contents: Contents, data: bytes) -> tuple[int, str]:
    assert len(data) == contents.data_bytes
    head = header(contents, digests_of(data, contents.block_bytes))
    path.write_bytes(head + data)
    return len(head) + len(data), digest(head)
