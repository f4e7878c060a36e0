"""The documentation says what is true: modules, links, commands and routes it names exist.

And nothing is left out: every module of the four packages has its place on the page about the architecture.
"""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from api.cli import app as command_line
from docs import generate

ROOT = Path(__file__).parents[2]
PACKAGES = ("zero_core", "workers", "service", "api")
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"

_MODULE = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[a-z_]+)+")
_LINK = re.compile(r"""\]\(([^()\s]+)(?:\s"[^"]*")?\)|(?:src|href|srcset)="([^"]+)\"""")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"`([^`\n]+)`")
_NOT_OURS = re.compile(r"^\.|^build$|^dist$|\.egg-info$")


def pages() -> list[Path]:
    """All Markdown of the repository, but for what tools keep in it."""
    folders = (path for path in ROOT.iterdir() if path.is_dir() and not _NOT_OURS.search(path.name))
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def modules() -> set[str]:
    """Every module and subpackage of the four packages, but for the packages themselves."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found |= {name} - {package}
    return found


def shell_lines(page: Path) -> Iterator[str]:
    """The commands in a page's shell blocks, continued lines joined."""
    for language, text in _FENCED.findall(page.read_text(encoding="utf-8")):
        if language in {"sh", "bash", "console"}:
            lines = (line.strip() for line in text.replace("\\\n", " ").splitlines())
            # JOB=$(command) is a command as well.
            yield from (re.sub(r"^\w+=\$\((.*)\)$", r"\1", line) for line in lines if line)


@cache
def routes() -> set[tuple[str, str]]:
    """Method and path of every route, with a star for each parameter."""
    return {
        (method.upper(), re.sub(r"\{\w+\}", "*", path))
        for path, methods in generate.openapi()["paths"].items()
        for method in methods
    }


def test_the_map_names_every_module_and_no_other() -> None:
    named = set(_QUOTED.findall(ARCHITECTURE.read_text(encoding="utf-8")))
    assert modules() - named == set(), "modules that docs/architecture.md does not name"
    claimed = {name for name in named if _MODULE.fullmatch(name)}
    assert claimed - modules() == set(), "modules that docs/architecture.md names and that do not exist"


def test_the_picture_names_modules_that_exist() -> None:
    named = set(_MODULE.findall(PICTURE.read_text()))
    assert named, "the picture names no module: has its form changed?"
    assert named - modules() == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    links = [first or second for first, second in _LINK.findall(page.read_text(encoding="utf-8"))]
    targets = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link)]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(command_line)
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if "elastic-zero" not in words:
            continue
        words = words[words.index("elastic-zero") + 1 :]
        name = next((word for word in words if word in group.commands), None)
        assert name is not None or words == ["--help"], f"{line!r} names no command"
        known = {option for parameter in group.params for option in parameter.opts} | {"--help"}
        command, rest = (group.commands[name], words[words.index(name) + 1 :]) if name else (None, [])
        while hasattr(command, "commands") and rest:
            assert rest[0] in command.commands, f"{line!r} names no command"
            command, rest = command.commands[rest[0]], rest[1:]
        if command is not None:
            known |= {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_requests_go_to_routes_that_exist(page: Path) -> None:
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        path = next((word.removeprefix("$API") for word in words if word.startswith("$API/")), None)
        if not line.startswith("curl") or path is None:
            continue
        method = words[words.index("-X") + 1] if "-X" in words else "GET"
        assert (method, re.sub(r"\$\w+", "*", path.partition("?")[0])) in routes(), line


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.name)
def test_reference_pages_are_up_to_date(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == generate.pages()[page], "run `make docs`"
