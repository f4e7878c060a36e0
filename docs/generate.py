"""Writes the reference pages from the code: `make docs`, or `python -m docs.generate`.

Owns how a JSON schema and an OpenAPI description read as Markdown. What they say is said in `workers.spec`,
`api.schemas` and the routes: a page that reads badly is mended there. Needs no running service.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from api.app import create_app
from api.auth import Auth
from api.problems import STATUS
from service import errors
from service.control_plane import ControlPlane
from service.fake_cluster import FakeCluster
from service.settings import Settings
from service.store import Store
from workers.spec import JobSpec

HERE = Path(__file__).parent
JOB_SPEC_PAGE = HERE / "reference" / "job-spec.md"
SETTINGS_PAGE = HERE / "reference" / "settings.md"
REST_PAGE = HERE / "reference" / "rest.md"

Schema = Mapping[str, Any]

_GENERATED = "<!-- Written by `make docs` from the code. Change the code, not this page. -->"

_ACROSS_FIELDS = (
    "`global_batch` is a multiple of `micro_batch`; the quotient M is the number of micro-batches of a step.",
    "`workers.min` <= `workers.wanted` <= `workers.max`, and `workers.wanted` <= M: a rank needs at least "
    "one micro-batch.",
    "`schedule.warmup_steps` does not exceed `steps`.",
    "`optimizer.groups` have different names, none of them `default`, and set either `lr` or `lr_factor`.",
    "`loss_scale`: `floor` <= `initial` <= `ceiling`.",
    "`start_from` names exactly one of `job`, `checkpoint` and `safetensors`; `step` goes with `job`.",
    "Places (`checkpoints.location`, `start_from.checkpoint`, `start_from.safetensors`) are absolute paths "
    "or addresses, without `..` and without credentials.",
    "Unknown fields are refused everywhere, and so are infinities and NaN.",
)

_FURTHER_CODES = (
    ("unknown_rank", 404, "The job has never had this rank."),
    ("unknown_worker", 404, "The job has no log of this worker."),
    ("unknown_node", 404, "The cluster has no such node."),
    ("node_gone", 409, "The node is gone already, so it cannot be drained."),
    ("head_node", 409, "The node is the head of the Ray cluster, which ends with it; it cannot be drained."),
    ("unknown_checkpoint", 404, "The job has no checkpoint of this step."),
    ("no_checkpoint", 422, "The job that another one is to start from has no checkpoint yet."),
    ("checkpoints_unreachable", 422, "The service cannot read the place of the job's checkpoints."),
    ("unknown_route", 404, "Nothing is served under the path."),
    ("invalid_cursor", 422, "The cursor is not one that a page of jobs returned."),
    ("malformed_json", 400, "The body is not JSON."),
    ("unauthorized", 401, "The token is missing or wrong."),
    ("foreign_host", 403, "The Host header names a host that is not served (setting `allowed_hosts`)."),
    ("foreign_origin", 403, "A browser sent the request for a page of another site."),
    ("method_not_allowed", 405, "The path answers other methods only."),
    ("body_too_large", 413, "The body exceeds the bound."),
    ("export_failed", 500, "An export could not be written; the detail says why, and nothing of it is left."),
    ("cluster_error", 500, "The cluster refused for a reason that is no outage."),
    ("internal_error", 500, "A fault of the service; its log says more."),
    ("too_many_streams", 503, "All streams are in use."),
)
"""Codes that do not stand as `default_code` in `service.errors`."""


def pages() -> dict[Path, str]:
    """Every reference page with the text it must have."""
    return {JOB_SPEC_PAGE: job_spec_page(), SETTINGS_PAGE: settings_page(), REST_PAGE: rest_page()}


def job_spec_page() -> str:
    """All fields of a job specification."""
    schema = JobSpec.model_json_schema()
    parts = [
        _GENERATED,
        "# The job specification",
        "What `elastic-zero submit` reads from a YAML or JSON file and `POST /v1/jobs` takes as its body. "
        "Three examples are in [examples/jobs](../../examples/jobs).",
        *_section("JobSpec", schema, schema["$defs"]),
        *(part for name in _in_order_of_use(schema) for part in _section(name, schema["$defs"][name], {})),
        "## Rules across fields",
        "\n".join(f"- {rule}" for rule in _ACROSS_FIELDS),
    ]
    return "\n\n".join(parts) + "\n"


def settings_page() -> str:
    """What the operator may set."""
    schema = Settings.model_json_schema()
    rows = [
        (
            f"`{Settings.model_config['env_prefix']}{name.upper()}`",
            _type(field),
            _default(field, required=False),
            field["description"],
        )
        for name, field in schema["properties"].items()
    ]
    parts = [
        _GENERATED,
        "# Settings",
        "Environment variables that `elastic-zero serve` reads. Its options `--host`, `--port`, "
        "`--local-cpus` and `--ray-address`, and `--data-dir` of `elastic-zero` itself, count before them.",
        _table(("variable", "type", "default", "meaning"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def rest_page() -> str:
    """All routes of the API but the dashboard's, with what they take and answer."""
    api = openapi()
    operations = list(_operations(api))
    parts = [
        _GENERATED,
        "# The REST API",
        "Every route but the health checks needs the header `Authorization: Bearer <token>` with the token "
        "that the service keeps in the file `token` of its data folder; the dashboard's session cookie "
        "serves as well. An optional header `X-Requested-By` is a name for the record of who asked. Bodies "
        "and answers are JSON; times are Unix seconds. The same description is served as OpenAPI under "
        "`/v1/openapi.json`.",
        _table(
            ("route", "answer", "what it does"),
            [
                (f"[`{method} {path}`](#{_anchor(f'{method} {path}')})", _answers(said), _first(said))
                for method, path, said in operations
            ],
        ),
        *(part for each in operations for part in _route(*each)),
        "## Errors",
        "Every error is `application/problem+json` (RFC 9457) with the members `type`, `title`, `status`, "
        "`detail`, `instance` and a stable `code`; many add the values seen. An invalid specification or "
        "request lists each complaint in `errors`, with `field`, `message` and `value`.",
        _table(("code", "status", "meaning"), sorted(_codes())),
        "## Objects",
        *(part for name, schema in _objects(api) for part in _wire_object(name, schema)),
    ]
    return "\n\n".join(parts) + "\n"


def openapi() -> dict[str, Any]:
    """The application's own description of its routes, made without a service."""
    store = Store("sqlite://")
    try:
        plane = ControlPlane(Settings(data_dir=HERE), store, FakeCluster())
        return create_app(plane, Auth(token="none")).openapi()
    finally:
        store.close()


# Routes.


def _operations(api: Schema) -> Iterator[tuple[str, str, Schema]]:
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _route(method: str, path: str, operation: Schema) -> list[str]:
    parts = [f"## {method} {path}", operation["description"]]
    parameters = [
        (
            f"`{parameter['name']}`",
            parameter["in"],
            _type(parameter["schema"]),
            _default(parameter["schema"], required=parameter.get("required", False)),
            parameter.get("description", ""),
        )
        for parameter in operation.get("parameters", ())
    ]
    if parameters:
        parts.append(_table(("parameter", "in", "type", "default", "meaning"), parameters))
    if "requestBody" in operation:
        parts.append(f"Body: {_type(_json_schema(operation['requestBody']))}.")
    parts.append(f"Answer: {_answers(operation)}.")
    return parts


def _answers(operation: Schema) -> str:
    """Status and type of each answer that is no error; errors are all of one shape, listed on their own."""
    found = []
    for status, answer in operation["responses"].items():
        if not status.startswith("2"):
            continue
        schema = _json_schema(answer)
        found.append(f"{status} {_type(schema)}" if schema else status)
    return " or ".join(found)


def _json_schema(body: Schema) -> Schema:
    schema: Schema = body.get("content", {}).get("application/json", {}).get("schema", {})
    return schema


def _codes() -> Iterator[tuple[str, str, str]]:
    for kind, status in STATUS.items():
        yield f"`{kind.default_code}`", str(status), _flowing(kind.__doc__ or "")
    gone, status = errors.ControllerGone, STATUS[errors.ClusterUnavailable]
    yield f"`{gone.default_code}`", str(status), _flowing(gone.__doc__ or "")
    for code, status, meaning in _FURTHER_CODES:
        yield f"`{code}`", str(status), meaning


def _objects(api: Schema) -> list[tuple[str, Schema]]:
    """The schemas of bodies and answers, but for those of the specification and FastAPI's errors."""
    elsewhere = {"HTTPValidationError", "ValidationError", *_of_the_spec()}
    schemas: Mapping[str, Schema] = api["components"]["schemas"]
    return [(name, schema) for name, schema in sorted(schemas.items()) if name not in elsewhere]


# Schemas.


def _of_the_spec() -> set[str]:
    return {"JobSpec", *JobSpec.model_json_schema()["$defs"]}


def _in_order_of_use(schema: Schema) -> list[str]:
    """Names of the definitions in the order in which the specification's fields mention them."""
    found: dict[str, None] = {}

    def walk(inside: Schema) -> None:
        for field in inside.get("properties", {}).values():
            for inner in (field, *field.get("oneOf", ()), *field.get("anyOf", ()), field.get("items", {})):
                name = inner.get("$ref", "").rpartition("/")[2]
                if name and name not in found:
                    found[name] = None
                    walk(schema["$defs"][name])

    walk(schema)
    return list(found)


def _wire_object(name: str, schema: Schema) -> list[str]:
    """Heading, text and members of one body or answer."""
    parts = [f"### {name}", _flowing(schema["description"])]
    if "enum" in schema:
        return [*parts, _one_of(schema)]
    rows = [
        (f"`{member}`", _type(inner), _meaning(inner, {}))
        for member, inner in schema.get("properties", {}).items()
    ]
    return [*parts, _table(("member", "type", "meaning"), rows)]


def _one_of(schema: Schema) -> str:
    return "One of " + ", ".join(f"`{value}`" for value in schema["enum"]) + "."


def _section(name: str, schema: Schema, definitions: Mapping[str, Schema]) -> list[str]:
    """Heading, text and fields of one part of the specification.

    A field without words of its own takes the first of its object's, if that is among `definitions`.
    """
    parts = [f"## {name}", _flowing(schema["description"])]
    if "enum" in schema:
        return [*parts, _one_of(schema)]
    required = set(schema.get("required", ()))
    rows = [
        (
            f"`{field}`",
            _type(inner),
            _default(inner, required=field in required),
            _meaning(inner, definitions),
        )
        for field, inner in schema.get("properties", {}).items()
    ]
    return [*parts, _table(("field", "type", "default", "meaning"), rows)]


def _meaning(field: Schema, definitions: Mapping[str, Schema]) -> str:
    if "description" in field:
        return str(field["description"])
    name = field.get("$ref", "").rpartition("/")[2]
    return _first(definitions[name]) if name in definitions else ""


def _type(schema: Schema) -> str:
    """A schema in a few words, with links to the objects it names."""
    if "$ref" in schema:
        return _link(schema["$ref"].rpartition("/")[2])
    for choice in ("anyOf", "oneOf"):
        if choice in schema:
            return " or ".join(_type(inner) for inner in schema[choice])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"`{json.dumps(value)}`" for value in values)
    kind = str(schema.get("type", "any"))
    if kind == "array":
        return _list_type(schema)
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_type(schema['additionalProperties'])}"
    return kind + _bounds(schema)


def _list_type(schema: Schema) -> str:
    if "prefixItems" in schema:
        return "list of " + ", ".join(_type(inner) for inner in schema["prefixItems"])
    inner = f"list of {_type(schema.get('items', {}))}"
    return inner + (f", at least {schema['minItems']}" if "minItems" in schema else "")


def _bounds(schema: Schema) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    whole = int if schema.get("type") == "integer" else float
    said = [f"{sign} {_short(whole(schema[name]))}" for name, sign in signs.items() if name in schema]
    if "multipleOf" in schema:
        said.append(f"a multiple of {schema['multipleOf']}")
    if "maxLength" in schema:
        said.append(f"of {schema.get('minLength', 0)} to {schema['maxLength']} characters")
    if "pattern" in schema:
        said.append(f"matching `{schema['pattern']}`")
    return f" {' and '.join(said)}" if said else ""


def _short(number: float) -> str:
    return str(number).removesuffix(".0")


def _default(schema: Schema, *, required: bool) -> str:
    if required:
        return "required"
    if "default" in schema:
        return f"`{json.dumps(schema['default'])}`"
    if schema.get("type") == "object":
        return "`{}`"
    return "its own defaults" if "$ref" in schema or "oneOf" in schema else ""


def _link(name: str) -> str:
    page = JOB_SPEC_PAGE.name if name in _of_the_spec() else ""
    return f"[{name}]({page}#{_anchor(name)})"


# Markdown.


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return _flowing(text).replace("|", "\\|")


def _flowing(text: str) -> str:
    """A docstring's text with its line breaks, but not its paragraphs, taken out."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def _first(described: Schema) -> str:
    """The first paragraph of a description."""
    return _flowing(described["description"]).split("\n\n", maxsplit=1)[0]


def _anchor(heading: str) -> str:
    """The anchor that a heading gets on a rendered page."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def main() -> None:
    """Write every page."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
