"""What the control plane may import from here without loading torch or Ray."""

import subprocess
import sys

import pytest

LIGHT = (
    "spec",
    "reports",
    "naming",
    "commands",
    "protocol",
    "policies",
    "model_shapes",
    "engine_config",
    "orders",
    "progress",
    "draining",
    "mover",
    "committed",
    "latest",
)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_neither_torch_nor_ray(module: str) -> None:
    code = f"import sys, workers.{module}; print(sorted({{'torch', 'ray'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
