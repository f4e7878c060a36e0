"""The front door loads neither torch nor Ray; the client and the command line not even the web server."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("api.server", {"torch", "ray"}),
        ("api.demo", {"torch", "ray", "fastapi", "sqlalchemy"}),
        ("api.cli", {"torch", "ray", "fastapi", "sqlalchemy", "uvicorn"}),
    ],
)
def test_what_is_not_loaded(module: str, absent: set[str]) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert not absent & set(json.loads(ended.stdout))
