"""A state of a few bytes, saved without an engine: for tests of what happens to files."""

from dataclasses import dataclass

from tests.unit.zero_core.written import digests_of
from zero_core.checkpoint import manifest
from zero_core.checkpoint.container import buffer_contents, digest, digests_in, kinds_of, rank_contents
from zero_core.checkpoint.manifest import Manifest
from zero_core.checkpoint.store import Store, open_store
from zero_core.checkpoint.writing import Payload, Work
from zero_core.layout import Layout, ParameterSpec, build_layout

CONTENT = bytes(range(256)) * 16
"""What every file's data section begins with; the step is added to every byte."""

BUFFERS = (("calls", "I64", ()), ("mask", "BOOL", (3,)))


@dataclass(frozen=True)
class Form:
    layout: Layout
    kinds: tuple[str, ...] = ("master", "momentum", "variance")
    precision: str = "fp32"


def layout_of(world_size: int) -> Layout:
    specs = [
        ParameterSpec("a", (7, 11)),
        ParameterSpec("b", ()),
        ParameterSpec("c", (101,)),
        ParameterSpec("f", (13,), False, "uint8"),
    ]
    return build_layout(specs, lambda name: "" if name < "c" else name, tile=8, world_size=world_size)


def content(count: int, step: int) -> bytes:
    return bytes((byte + step) % 256 for byte in CONTENT[:count])


def draft_of(world_size: int, step: int, generation: int) -> Manifest:
    form = Form(layout_of(world_size))
    return Manifest(
        step=step,
        generation=generation,
        stage=2,
        precision=form.precision,
        layout=form.layout,
        kinds=form.kinds,
        files=(),
        extra={"step": step},
        created=0.0,
        updates=step,
        buffers=BUFFERS,
    )


def work_of(
    store: Store,
    *,
    world_size: int,
    step: int,
    generation: int = 1,
    fenced: bool = False,
    token: str = "0123456789ab",
) -> list[Work]:
    """Every rank's work, and its folder made."""
    draft = draft_of(world_size, step, generation)
    works = []
    for rank in range(world_size):
        contents = {manifest.shard_name(rank): rank_contents(draft, rank)}
        if rank == 0:
            contents[manifest.BUFFERS] = buffer_contents(BUFFERS)
        payloads = {
            name: Payload(one, [memoryview(content(one.data_bytes, step))]) for name, one in contents.items()
        }
        parts = tuple(
            (kind, unit, *draft.layout.owned(unit, rank))
            for unit in range(len(draft.layout.units))
            for kind in kinds_of(draft, unit)
        )
        works.append(Work(store, draft, rank, token, fenced, 20.0, payloads, parts))
    store.make_folder(works[0].temporary, parents=not fenced)
    return works


def reads_back(store: Store, step: int, generation: int = 1) -> None:
    """The newest checkpoint is that of `step`, and every byte of it is as it was."""
    info = manifest.latest(store)
    assert info is not None
    assert (info.step, info.generation) == (step, generation)
    found = manifest.read(info.location)
    folder = open_store(info.location)
    contents = [rank_contents(found, rank) for rank in range(found.world_size)]
    files = zip(manifest.expected_files(found.world_size), found.files, strict=True)
    for (name, (size, told)), one in zip(files, [*contents, buffer_contents(found.buffers)], strict=True):
        data = folder.read(name)
        front, data = data[: one.header_bytes], data[one.header_bytes :]
        assert len(front) + len(data) == size == one.file_bytes
        assert digest(front) == told
        assert data == content(len(data), step)
        assert digests_in(front, one) == digests_of(data)
