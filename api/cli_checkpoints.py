"""The commands `elastic-zero checkpoint ...` and `elastic-zero reshard`: a job's checkpoints, or a folder's.

A target is a job (its id or the beginning of it, `@STEP` behind it for another than the newest), asked
through the service; or a folder or an address (anything with a slash in it), read from here without one.
`show`, `diff` and `reshard` read a job's files from here as well: the service only says where they are.
"""

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table

from api import planning, render
from api.cli_common import FOUND, AsJson, DamageFound, JobArgument, UserMistake, err, options_of, out
from api.client import Client
from api.schemas import CheckpointOut, CheckpointsOut, DamageOut, UnusableOut
from workers.committed import committed, is_checkpoint
from zero_core.checkpoint import manifest
from zero_core.checkpoint.manifest import CheckpointInfo, Manifest
from zero_core.checkpoint.store import open_store, split
from zero_core.errors import CheckpointError, DamagedError

group = typer.Typer(no_args_is_help=True, help="A job's checkpoints, or those in a folder.")

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="A job, as JOB or JOB@STEP, whose checkpoints the service knows; or, with a slash in it, a "
        "folder of this machine (not the service's) or an address: of a checkpoint, or of several, of which "
        "the newest is meant.",
    ),
]
_SHOWN = 20
_WIDEST = 100_000
"""Characters of a line."""


class Dtype(StrEnum):
    """Of exported parameters."""

    MASTER = "master"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@dataclass(frozen=True, slots=True)
class _Job:
    """A job as a target; step None: its newest checkpoint."""

    prefix: str
    step: int | None


@group.command("ls")
def ls(context: typer.Context, target: Target, as_json: AsJson = False) -> None:
    """List the committed checkpoints, newest last."""
    found, unusable = _listed(context, target)
    for bad in unusable:
        err.print(
            f"step {bad.step} of generation {bad.generation} cannot be loaded: {bad.what} ({bad.path})",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    if as_json:
        typer.echo(json.dumps([one.model_dump(mode="json") for one in found]))
        return
    table = Table("step", "generation", "workers", "stage", "bytes", "saved", "where", box=None)
    for one in found:
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.created))
        cells = (one.step, one.generation, one.world_size, one.stage, render.size(one.bytes), saved, one.path)
        table.add_row(*(str(cell) for cell in cells))
    if found:
        _print_whole(table)
    else:
        out.print("none")


@group.command("show")
def show(context: typer.Context, target: Target, as_json: AsJson = False) -> None:
    """Show what one checkpoint holds, as its manifest says. Its files are read from here, a job's too."""
    one = _chosen(context, target)
    facts = _facts(one, _readable(one.path))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), str(value))
    _print_whole(table)


@group.command("save")
def save(context: typer.Context, job: JobArgument) -> None:
    """Save a job's state at the next step boundary."""
    with options_of(context).client() as client:
        after = client.save_checkpoint(client.find(job).id)
    typer.echo(f"job {after.id}: a checkpoint is saved at the next step boundary")


@group.command("verify")
def verify(context: typer.Context, target: Target, as_json: AsJson = False) -> None:
    """Read a whole checkpoint; exit code 4 if anything in it is damaged."""
    job = _job(target)
    if job is None:
        from zero_core.checkpoint import inspection

        path = _newest(target)
        damage = [
            DamageOut(file=one.file, start=one.start, stop=one.stop, what=one.what)
            for one in inspection.verify(path)
        ]
    else:
        with options_of(context).client() as client:
            job_id = client.find(job.prefix).id
            step = _newest_step(client, job_id) if job.step is None else job.step
            verified = client.verify_checkpoint(job_id, step)
        path, damage = verified.path, verified.damage
    if as_json:
        told = {"path": path, "whole": not damage, "damage": [one.model_dump() for one in damage]}
        typer.echo(json.dumps(told))
    else:
        for one_damage in damage:
            typer.echo(f"{one_damage.file} [{one_damage.start}, {one_damage.stop}): {one_damage.what}")
        typer.echo(f"{path}: {f'{len(damage)} places are damaged' if damage else 'whole'}")
    if damage:
        raise typer.Exit(FOUND)


@group.command("diff")
def diff(
    context: typer.Context,
    first: Target,
    second: Annotated[str, typer.Argument(metavar="TARGET", help="Likewise.")],
    as_json: AsJson = False,
) -> None:
    """Compare the states of two checkpoints, of whatever world sizes; exit code 4 if they differ.

    Their files are read from here, a job's too.
    """
    from zero_core.checkpoint import inspection

    paths = [_chosen(context, target).path for target in (first, second)]
    for path in paths:
        _readable(path)
    found = [asdict(one) for one in inspection.diff(*paths)]
    if as_json:
        typer.echo(json.dumps({"paths": paths, "same": not found, "differences": found}))
    else:
        for difference in found[:_SHOWN]:
            typer.echo(", ".join(f"{name} {value}" for name, value in difference.items()))
        if len(found) > _SHOWN:
            typer.echo(f"and {len(found) - _SHOWN} more; --json has all")
        typer.echo("they differ" if found else "the same state")
    if found:
        raise typer.Exit(FOUND)


@group.command("export")
def export(
    context: typer.Context,
    target: Target,
    to: Annotated[
        str | None,
        typer.Option(help="New folder or address; of a folder only. A job's goes into the job's own folder."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of floating parameters; master: as stored.")] = Dtype.MASTER,
    max_shard: Annotated[str, typer.Option(help="Most bytes in a file, as 5GB.", metavar="BYTES")] = "5GB",
    as_json: AsJson = False,
) -> None:
    """Write the parameters as Hugging Face style safetensors."""
    limit, job = planning.byte_count(max_shard, "--max-shard"), _job(target)
    if job is None:
        if to is None:
            raise planning.WrongUsage(
                "--to: say into which new folder the parameters of a folder are exported"
            )
        folder, files = to, _exported(target, to, dtype, limit)
    else:
        if to is not None:
            raise planning.WrongUsage("--to: a job's parameters are exported into the job's own folder")
        with options_of(context).client() as client:
            job_id, one = _of_job(client, job)
            exported = client.export_checkpoint(job_id, one.step, dtype=dtype.value, max_shard_bytes=limit)
        folder, files = exported.folder, exported.files
    if as_json:
        typer.echo(json.dumps({"folder": folder, "files": files}))
    else:
        typer.echo(folder)


def _exported(target: str, to: str, dtype: Dtype, limit: int) -> list[str]:
    """Names of the files written to a new folder or address. Leaves nothing there where it fails."""
    from zero_core.checkpoint import interchange

    store = open_store(to)
    if store.names() or store.size("") is not None or (store.moves and Path(to).exists()):
        raise UserMistake(f"{to} exists: give a new folder")
    place = _place(target)
    draft = str(Path(to).parent / f".exporting-{secrets.token_hex(8)}") if store.moves else to
    try:
        written = interchange.export_model(place, draft, dtype=dtype.value, max_shard_bytes=limit)
        if draft != to:
            Path(draft).rename(to)
    except BaseException:
        left = open_store(draft)
        with suppress(OSError):  # what failed before is what is told
            for name in left.names():
                left.remove(name)
            if store.moves:
                Path(draft).rmdir()
        raise
    return sorted(split(location)[1] for location in written)


def reshard(
    context: typer.Context,
    target: Target,
    to: Annotated[
        int, typer.Option("--to", min=1, max=1_000_000, metavar="N", help="Ranks that would load it.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what each rank would read.")] = False,
    as_json: AsJson = False,
) -> None:
    """What each rank would read of a checkpoint at another world size. Nothing is written.

    The checkpoint's files are read from here, a job's too.
    """
    if not dry_run:
        raise planning.WrongUsage(
            "a checkpoint is loaded at any number of ranks as it is, so there is nothing to convert: "
            "--dry-run says what each rank would read"
        )
    from zero_core.checkpoint import inspection

    one = _chosen(context, target)
    written = _readable(one.path).world_size
    reads = [int(amount) for amount in inspection.dry_run(one.path, to)]
    if as_json:
        typer.echo(json.dumps({"path": one.path, "from": written, "to": to, "bytes": reads}))
        return
    typer.echo(f"{one.path}: {written} -> {to} ranks, {render.size(sum(reads))} read in all")
    for rank, amount in enumerate(reads[:_SHOWN]):
        typer.echo(f"rank {rank}: {render.size(amount)}")
    if to > _SHOWN:
        typer.echo(f"and {to - _SHOWN} more, the most any reads {render.size(max(reads))}; --json has all")


def _print_whole(table: Table) -> None:
    """As wide as it is, whatever the terminal or pipe: a path in it is to be copied, or read by programs."""
    table.width = Measurement.get(out, out.options.update(max_width=_WIDEST), table).maximum
    out.print(table, crop=False)


def _job(target: str) -> _Job | None:
    """The job that is meant; None where it is a folder or an address."""
    if "/" in target or target in {".", ".."}:
        return None
    prefix, mark, step = target.partition("@")
    if mark and not (step.isascii() and step.isdecimal()):
        raise planning.WrongUsage(f"{target!r}: behind the @ stands a step, as in {prefix}@100")
    return _Job(prefix, int(step) if mark else None)


def _of_job(client: Client, job: _Job) -> tuple[str, CheckpointOut]:
    """The job's id, and the one that is meant. Raises UserMistake, or DamageFound where it is damaged."""
    job_id = client.find(job.prefix).id
    found = client.surveyed_checkpoints(job_id)
    for one in reversed(found.checkpoints):
        if job.step in (None, one.step):
            return job_id, one
    damaged = [one for one in found.unusable if job.step in (None, one.step)]
    if damaged:
        which = "no checkpoint" if job.step is None else f"no checkpoint of step {job.step}"
        told = "; ".join(f"step {one.step} of generation {one.generation}: {one.what}" for one in damaged)
        raise DamageFound(
            f"job {job_id} has {which} that can be loaded: {told}; 'elastic-zero checkpoint verify "
            f"{job_id}@{damaged[-1].step}' says what is wrong with it"
        )
    if not found.checkpoints and not found.unusable:
        raise _none_yet(job_id)
    steps = ", ".join(map(str, _steps(found)))
    raise UserMistake(f"job {job_id} has no checkpoint of step {job.step}; there are: {steps}")


def _newest_step(client: Client, job_id: str) -> int:
    """Of a job's newest checkpoint, be it damaged. Raises UserMistake where there is none."""
    steps = _steps(client.surveyed_checkpoints(job_id))
    if not steps:
        raise _none_yet(job_id)
    return steps[-1]


def _steps(found: CheckpointsOut) -> list[int]:
    """Of all that were committed, damaged or not, the newest last."""
    return sorted({one.step for one in found.checkpoints} | {one.step for one in found.unusable})


def _none_yet(job_id: str) -> UserMistake:
    return UserMistake(f"job {job_id} has no checkpoint yet")


def _listed(context: typer.Context, target: str) -> tuple[list[CheckpointOut], list[UnusableOut]]:
    """What can be loaded, and what is seen to be damaged."""
    job = _job(target)
    if job is not None:
        with options_of(context).client() as client:
            found = client.surveyed_checkpoints(client.find(job.prefix).id)
        listed, unusable = found.checkpoints, found.unusable
        return [one for one in listed if job.step in (None, one.step)], [
            one for one in unusable if job.step in (None, one.step)
        ]
    with _reading(target):
        infos, damaged = manifest.survey(target)
    listed = [CheckpointOut.of(info) for info in infos] or [_single(_place(target))]
    return listed, [UnusableOut.of(one) for one in damaged]


def _chosen(context: typer.Context, target: str) -> CheckpointOut:
    """The one checkpoint that is meant."""
    job = _job(target)
    if job is None:
        return _single(_place(target))
    with options_of(context).client() as client:
        return _of_job(client, job)[1]


def _place(target: str) -> str:
    """Folder or address of the one checkpoint that is meant: the newest where it is a folder of them.

    Raises UserMistake where there is none, and DamageFound where none can be loaded.
    """
    with _reading(target):
        if is_checkpoint(target):
            return target.rstrip("/")
        newest = manifest.latest(target)
        if newest is not None:
            return newest.location
    damaged = _newest(target)
    raise DamageFound(
        f"no checkpoint in {target} can be loaded; the newest is {damaged}: "
        f"'elastic-zero checkpoint verify {damaged}' says what is wrong with it"
    )


def _newest(target: str) -> str:
    """The same, be it damaged. Raises UserMistake where there is none."""
    with _reading(target):
        if is_checkpoint(target):
            return target.rstrip("/")
        found = committed(target)
        if found:
            return found[-1].location
    raise UserMistake(_absence(target))


def _absence(target: str) -> str:
    """What is at a folder or address instead of checkpoints, and what to give."""
    if "://" in target:
        return f"there is no committed checkpoint at {target}: give the address of one, or of several"
    path = Path(target).absolute()
    what = f"{path} is no committed checkpoint and has none in it"
    if not path.exists():
        what = f"there is no {path} on this machine"
    elif not path.is_dir():
        what = f"{path} is a file"
    return (
        f"{what}: folders are read where the command runs, not where the service does; give the folder of a "
        "checkpoint or of several, or ask the service for a job's, as JOB or JOB@STEP"
    )


@contextmanager
def _reading(target: str) -> Iterator[None]:
    """Raises UserMistake where a folder or address cannot be read."""
    try:
        yield
    except OSError as error:
        raise UserMistake(
            f"{target} cannot be read: {error}; give a folder or address that can be read from here"
        ) from error


def _single(path: str) -> CheckpointOut:
    return CheckpointOut.of(CheckpointInfo.of(_readable(path), path))


def _readable(path: str) -> Manifest:
    """The manifest, read from here. Raises DamagedError, and UserMistake where it cannot be had."""
    from zero_core.checkpoint.reading import read_manifest

    try:
        return read_manifest(path)[0]
    except (CheckpointError, OSError) as error:
        if isinstance(error, DamagedError) and not isinstance(error.__cause__, OSError):
            raise
        raise UserMistake(
            f"the checkpoint at {path} cannot be read from here: {error}; if the service has it and this "
            "machine does not, run the command there ('checkpoint verify JOB' is done by the service)"
        ) from error


def _facts(one: CheckpointOut, said: Manifest) -> dict[str, Any]:
    return {
        "path": one.path,
        "step": said.step,
        "updates": said.updates,
        "generation": said.generation,
        "world_size": said.world_size,
        "stage": said.stage,
        "precision": said.precision,
        "kinds": list(said.kinds),
        "parameters": said.layout.numel(),
        "units": len(said.layout.units),
        "buffers": len(said.buffers),
        "tied": dict(said.aliases),
        "bytes": said.bytes,
        "created": said.created,
        "samples_consumed": said.extra.get("consumed"),
    }
