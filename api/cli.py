"""The command `elastic-zero`: each command asks the service one thing and shows the answer.

Finds the service and its token by the data folder. Exit codes: 0 done, 1 refused or failed, 2 wrong usage,
3 no answer from the service, 4 damage or differences found. About checkpoints: `api.cli_checkpoints`.
"""

import json
import signal
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from pydantic import ValidationError
from rich.text import Text
from typer.core import TyperGroup

from api import cli_checkpoints, planning, render, server_file
from api.cli_common import (
    FAILED,
    FOUND,
    UNREACHABLE,
    WRONG_USAGE,
    AsJson,
    DamageFound,
    JobArgument,
    Options,
    UserMistake,
    err,
    options_of,
    out,
)
from api.client import Client, ClientError, Refused, Unreachable
from api.connection import NoService
from api.narrator import Narrator
from api.schemas import JobOut
from api.server_file import ServerRecord
from api.token_file import TokenFileError
from service.errors import ServiceError
from service.local_ray import LocalRay
from service.settings import Settings
from workers.spec import JobSpec
from zero_core.errors import CheckpointError, ConfigError, DamagedError

END_TIMEOUT_S = 60.0

_EVENTS_SHOWN = 12


class _Commands(TyperGroup):
    """The commands, with the errors that users can do something about turned into a line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Unreachable, NoService) as error:
            _fail(str(error), UNREACHABLE)
        except Refused as error:
            code = FOUND if error.code == "damaged_checkpoint" else FAILED
            _fail(f"{error.code}: {error.detail}", code, error.members.get("errors"))
        except (planning.WrongUsage, ConfigError) as error:
            _fail(str(error), WRONG_USAGE)
        except (DamagedError, DamageFound) as error:
            _fail(str(error), FOUND)
        except (ClientError, ServiceError, TokenFileError, UserMistake, CheckpointError, OSError) as error:
            _fail(str(error), FAILED)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Trains models too large for one device, as a service.",
)
app.add_typer(cli_checkpoints.group, name="checkpoint")
app.command("reshard")(cli_checkpoints.reshard)


@app.callback()
def options(
    context: typer.Context,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the service's data, address and token.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Address of a service elsewhere.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with its token; it must be readable by you only.")
    ] = None,
) -> None:
    """Trains models too large for one device, as a service."""
    given = {} if data_dir is None else {"data_dir": data_dir}
    context.obj = Options(_settings(**given), url, token_file)


FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Job specification, YAML or JSON.")]


@app.command()
def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="Address to bind; loopback unless told otherwise.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.")] = None,
    local_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs of the local Ray.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="host:port of a running Ray cluster, instead of a local one.")
    ] = None,
) -> None:
    """Run the service here until Ctrl-C or SIGTERM."""
    # The web server's and the database's code takes a second to load, which the other commands save.
    from api.server import ServeError
    from api.server import serve as serve_until_told

    given = {"host": host, "port": port, "local_cpus": local_cpus, "ray_address": ray_address}
    before = options_of(context).settings
    overrides = {name: value for name, value in given.items() if value is not None}
    settings = _settings(**{"data_dir": before.data_dir, **overrides})
    try:
        serve_until_told(settings, announce=typer.echo)
    except ServeError as error:
        raise UserMistake(str(error)) from error


@app.command()
def down(
    context: typer.Context,
    force: Annotated[
        bool, typer.Option(help="End the local Ray although jobs run on it; they go on at the next serve.")
    ] = False,
) -> None:
    """End the service of this data folder, and its local Ray."""
    settings = options_of(context).settings
    record = server_file.read(settings.data_dir)
    if record is not None and record.alive:
        _end(record)
        typer.echo("the service has ended")
    else:
        typer.echo(f"no service runs on the data folder {settings.data_dir}")
    local = LocalRay(settings.data_dir)
    if local.running and not force:
        _refuse_if_live(settings)
    if local.stop():
        typer.echo("the local Ray has been stopped")


@app.command()
def submit(
    context: typer.Context,
    file: FileArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and watch it.")] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(help="A repeat with the same key returns the first job.")
    ] = None,
) -> None:
    """Submit a job; prints its id."""
    with options_of(context).client() as client:
        job = client.submit(_specification(file), idempotency_key=idempotency_key)
        typer.echo(job.id)
        if watch:
            _watch(client, job)


@app.command()
def plan(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Job specification, YAML or JSON; or --params.")
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(
            help="Parameters of a model: 7.5e9, 7.5B. Without it, 12 x layers x hidden^2.", metavar="N"
        ),
    ] = None,
    dp: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; FILE: its workers.wanted, else 1.")
    ] = None,
    mp: Annotated[int | None, typer.Option(help="Model-parallel degree; 1 without it.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; bf16 without it.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw, adam or sgd (with momentum); adamw without it.")
    ] = None,
    device_bytes: Annotated[
        str | None, typer.Option(help="Memory of a device, as 32GB: adds the largest model.", metavar="BYTES")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer blocks, for activations.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples in a rank's micro-batch.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens in a sample.")] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep the blocks' inputs only.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Keep the input of every K-th block; 1 without it.")
    ] = None,
    partition_activations: Annotated[
        bool, typer.Option("--partition-activations", help="Pa: split checkpoints over the mp ranks.")
    ] = False,
    host_checkpoints: Annotated[
        bool, typer.Option("--host-checkpoints", help="Checkpoints in host memory.")
    ] = False,
    fits: Annotated[
        bool,
        typer.Option(
            "--fits", help="Ask the service whether FILE's job fits the cluster; exit code 1 if not."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What each rank would hold and send at every stage: of a job (FILE), or of any model (--params).

    Pure arithmetic, made here, without the service. Only with --fits the service is asked.
    """
    of_model = {
        "--params": params,
        "--mp": mp,
        "--precision": precision,
        "--optimizer": optimizer,
        "--layers": layers,
        "--hidden": hidden,
        "--batch": batch,
        "--sequence": sequence,
        "--checkpointing": checkpointing or None,
        "--checkpoint-every": checkpoint_every,
        "--partition-activations": partition_activations or None,
        "--host-checkpoints": host_checkpoints or None,
    }
    given = _given(of_model)
    if fits:
        _fits(context, file, [*given, *_given({"--dp": dp, "--device-bytes": device_bytes})], as_json=as_json)
        return
    if file is not None:
        job = _valid(_specification(file), file)
        plans = planning.of_job_options(job, given, dp=dp, device_bytes=device_bytes)
    else:
        plans = planning.of_model_options(given, dp=dp, device_bytes=device_bytes)
    if as_json:
        typer.echo(json.dumps(plans.as_json()))
    else:
        out.print(render.stages_table(plans))


@app.command()
def jobs(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="The newest so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    with options_of(context).client() as client:
        page = client.page(limit=limit, state=state)
    if as_json:
        typer.echo(json.dumps([job.model_dump(mode="json") for job in page.jobs]))
        return
    out.print(render.jobs_table(page.jobs))
    if page.next_cursor is not None:
        err.print(f"there are more; --limit shows more than {limit}", style="dim")


@app.command()
def show(context: typer.Context, job: JobArgument, as_json: AsJson = False) -> None:
    """Show one job: state, each rank's memory and throughput, checkpoints, the latest events."""
    with options_of(context).client() as client:
        found = client.find(job)
        if as_json:
            typer.echo(found.model_dump_json())
            return
        events = list(client.events(found.id))[-_EVENTS_SHOWN:]
        out.print(render.job_details(found, client.ranks(found.id), client.checkpoints(found.id), events))


@app.command()
def watch(context: typer.Context, job: JobArgument) -> None:
    """Watch a job until it is over; exit code 1 unless it succeeded. Ctrl-C leaves it running."""
    with options_of(context).client() as client:
        _watch(client, client.find(job))


@app.command()
def resize(
    context: typer.Context,
    job: JobArgument,
    workers: Annotated[int, typer.Argument(min=1, metavar="N", help="Workers wanted.")],
) -> None:
    """Ask for another number of workers."""
    with options_of(context).client() as client:
        after = client.resize(client.find(job).id, workers)
    typer.echo(f"job {after.id}: {after.workers.wanted} workers wanted, {after.workers.current} at work")


@app.command()
def pause(context: typer.Context, job: JobArgument) -> None:
    """Save a job and free its workers."""
    with options_of(context).client() as client:
        _tell(client.pause(client.find(job).id))


@app.command()
def resume(context: typer.Context, job: JobArgument) -> None:
    """Let a paused job go on."""
    with options_of(context).client() as client:
        _tell(client.resume(client.find(job).id))


@app.command()
def cancel(context: typer.Context, job: JobArgument) -> None:
    """Stop a job for good."""
    with options_of(context).client() as client:
        _tell(client.cancel(client.find(job).id))


@app.command()
def nodes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the cluster's nodes: what they have free, and which jobs are on them."""
    with options_of(context).client() as client:
        found = client.nodes()
    if as_json:
        typer.echo(json.dumps([node.model_dump(mode="json") for node in found]))
        return
    out.print(render.nodes_table(found, now=time.time()))


@app.command()
def drain(
    context: typer.Context,
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="Id of the node, the beginning of it, or its address.")
    ],
    reason: Annotated[str, typer.Option(help="For people.")] = "asked for",
    deadline: Annotated[
        float | None, typer.Option(min=1, help="Seconds until the machine is taken away.", metavar="SECONDS")
    ] = None,
) -> None:
    """Give a node no new work, and have jobs move off it without losing a step."""
    with options_of(context).client() as client:
        after = client.drain(client.find_node(node).id, reason=reason, deadline_s=deadline)
    on_it = ", ".join(f"job {one.job} ({len(one.workers)} workers)" for one in after.jobs) or "no job"
    typer.echo(f"node {after.id[:12]} ({after.address}) is drained; on it: {on_it}")


@app.command()
def logs(
    context: typer.Context,
    job: JobArgument,
    worker: Annotated[str | None, typer.Option(help="One worker by name.")] = None,
    tail: Annotated[int, typer.Option(min=1, max=5000, help="Last lines of each.")] = 50,
) -> None:
    """Show the ends of the workers' logs."""
    with options_of(context).client() as client:
        for log in client.logs(client.find(job).id, worker=worker, tail=tail):
            out.print(Text(f"== {log.worker}", style="bold"))
            # Not through rich: a log is shown as it is.
            for line in log.lines:
                typer.echo(line)


@app.command()
def dashboard(context: typer.Context) -> None:
    """Print the dashboard's address, and where the token for signing in is."""
    given = options_of(context)
    with given.client() as client:
        client.ready()
        typer.echo(f"{client.url}/dashboard")
    err.print(f"sign in with the token in {given.token_file or given.settings.token_file}", style="dim")


@app.command()
def demo() -> None:
    """Run the main job here, beginning to end: learn real text, resize 2 -> 4 -> 3, show what it cost."""
    from api.demo import DemoFailed, run

    try:
        run(out)
    except DemoFailed as error:
        raise UserMistake(f"the demo failed: {error}") from error


def _given(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _fits(context: typer.Context, file: Path | None, others: list[str], *, as_json: bool) -> None:
    """Ask the service about the job in `file`, at the workers it wants; `others` are options given beside."""
    if file is None:
        raise planning.WrongUsage("--fits asks the service about a job: give its FILE")
    if others:
        raise planning.WrongUsage(
            f"--fits asks the service about FILE as it is; leave out {', '.join(others)}"
        )
    with options_of(context).client() as client:
        answer = client.plan(_specification(file))
    if as_json:
        typer.echo(answer.model_dump_json())
    else:
        out.print(render.plan_table(answer))
    if not answer.fits:
        raise typer.Exit(FAILED)


def _valid(content: dict[str, Any], file: Path) -> JobSpec:
    """The job in `content`, read from `file`, checked here as the service would."""
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        said = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'the job'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors()
        )
        raise UserMistake(f"{file} is no job specification: {said}") from error


def _refuse_if_live(settings: Settings) -> None:
    """Raise UserMistake if jobs live on the local Ray, as the database tells."""
    from api.server import named
    from service.jobs import LIVE
    from service.store import Store

    with closing(Store(settings.store_url)) as store:
        live = store.in_states(LIVE)
    if live:
        raise UserMistake(
            f"jobs live on the local Ray ({named(live)}), so it is left running; "
            "'elastic-zero down --force' ends it; they go on from their last checkpoints at the next serve"
        )


def _end(record: ServerRecord) -> None:
    """Ask the service's process to end and wait until it has. It is not our child, so it is looked at."""
    with suppress(psutil.NoSuchProcess):
        psutil.Process(record.pid).send_signal(signal.SIGTERM)
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while record.alive:
        if time.monotonic() > deadline_s:
            raise UserMistake(f"the service (process {record.pid}) has not ended after {END_TIMEOUT_S:.0f} s")
        time.sleep(0.1)


def _settings(**values: Any) -> Settings:
    try:
        return Settings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise UserMistake(f"setting {name}: {first['msg']} (it is {first['input']!r})") from error


def _specification(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserMistake(f"cannot read {file}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserMistake(f"{file} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserMistake(f"{file} must hold a mapping of fields, not {type(content).__name__}")
    return content


def _watch(client: Client, job: JobOut) -> None:
    last = job
    try:
        with Narrator(out) as narrator:
            for streamed in client.follow(job.id):
                narrator.tell(streamed.item)
                if isinstance(streamed.item, JobOut):
                    last = streamed.item
    except KeyboardInterrupt:
        err.print(f"job {job.id} runs on; 'elastic-zero watch {job.id}' looks again", style="dim")
        raise typer.Exit(0) from None
    _tell(last)
    if last.state != "succeeded":
        raise typer.Exit(FAILED)


def _tell(job: JobOut) -> None:
    reason = f" ({job.reason})" if job.reason else ""
    typer.echo(
        f"job {job.id}: {job.state}{reason}, step {job.step} of {job.steps}, loss {render.loss(job.loss)}"
    )


def _fail(text: str, code: int, listed: list[dict[str, str]] | None = None) -> None:
    err.print(Text.assemble(("error: ", "bold red"), text), soft_wrap=True)
    for item in (listed or [])[1:]:
        err.print(Text(f"       {item['field']}: {item['message']}"))
    sys.exit(code)


if __name__ == "__main__":
    app()
