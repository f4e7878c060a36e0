"""`elastic-zero plan`: the answer for a parameter count and for a job, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from api.cli import FAILED, UNREACHABLE, WRONG_USAGE, app
from api.planning import WrongUsage, byte_count, parameter_count
from service.planner import plan
from tests.unit.api.running import SPEC
from workers.spec import JobSpec
from zero_core.estimate import STAGES, Training, model_states, wire_elements

TRANSFORMER = ("--layers", "125", "--hidden", "8192", "--batch", "32", "--sequence", "1024")


def _run(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--data-dir", str(folder), "plan", *arguments])


def _json(folder: Path, *arguments: str) -> dict[str, Any]:
    result = _run(folder, *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    told: dict[str, Any] = json.loads(result.stdout)
    return told


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job whose layout rounds and pads: 2 workers, 4 micro-batches."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def test_the_paper_s_first_example(tmp_path: Path) -> None:
    told = _json(tmp_path, "--params", "7.5e9", "--dp", "64")
    assert [told[str(stage)]["model_state_bytes"] for stage in STAGES] == [
        120_000_000_000,
        31_406_250_000,
        16_640_625_000,
        1_875_000_000,
    ]
    for stage in STAGES:
        row = told[str(stage)]
        parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
        assert sum(row[part] for part in parts) == row["model_state_bytes"]
        assert row["wire_elements_per_rank"] == (2 if stage < 3 else 3) * 7_500_000_000 * 63 // 64
        assert sum(row["wire_elements_by_kind"].values()) == row["wire_elements_per_rank"]
        assert isinstance(row["wire_elements_per_rank"], int)
    assert (told["parameters"], told["dp"], told["precision"]) == (7_500_000_000, 64, "bf16")


def test_every_option_counts(tmp_path: Path) -> None:
    told = _json(
        tmp_path, "--params", "1000", "--dp", "4", "--mp", "2", "--precision", "fp16", "--optimizer", "sgd",
        "--device-bytes", "6kB",
    )  # fmt: skip
    training = Training(dp=4, mp=2, precision="fp16", moments=1)
    for stage in STAGES:
        states, row = model_states(1000, training, stage), told[str(stage)]
        assert row["model_state_bytes"] == states.total
        assert row["wire_elements_per_rank"] == sum(wire_elements(1000, training, stage).values())
    assert told["0"]["largest_model_parameters"] == 2 * 500
    assert told["3"]["largest_model_parameters"] == 2 * 2000
    assert told["device_bytes"] == 6000


def test_activations(tmp_path: Path) -> None:
    told = _json(tmp_path, *TRANSFORMER, "--mp", "16", "--checkpointing", "--partition-activations")
    assert told["parameters"] == 12 * 125 * 8192**2
    assert told["activations"]["kept_bytes"] == 2 * 125 * 32 * 1024 * 8192 // 16
    row = told["3"]
    activation = told["activations"]["kept_bytes"] + told["activations"]["recomputed_bytes"]
    assert row["activation_bytes"] == activation
    assert row["total_bytes"] == row["model_state_bytes"] + activation
    on_host = _json(
        tmp_path, *TRANSFORMER, "--checkpointing", "--host-checkpoints", "--checkpoint-every", "5"
    )
    assert on_host["activations"]["kept_bytes"] == 0
    assert on_host["activations"]["host_bytes"] == 2 * 25 * 32 * 1024 * 8192
    # What the activations take is not there for the model.
    kept = _json(tmp_path, "--params", "1e9", *TRANSFORMER, "--device-bytes", "900GB")
    assert kept["0"]["largest_model_parameters"] == (900 * 10**9 - kept["0"]["activation_bytes"]) // 16
    assert "activations" not in _json(tmp_path, "--layers", "2", "--hidden", "8")


@pytest.mark.parametrize("workers", [2, 3])
def test_a_job_over_its_exact_layout(job: Path, tmp_path: Path, workers: int) -> None:
    told = _json(tmp_path, str(job), "--dp", str(workers))
    spec = JobSpec.model_validate(SPEC)
    psi = told["parameters"]
    training = Training(dp=workers, precision="fp32", micro_batches=4)
    for stage in STAGES:
        row = told[str(stage)]
        asked = JobSpec.model_validate(SPEC | {"zero": {"stage": stage}})
        budget = plan(asked, None, workers=workers).per_rank
        assert budget is not None
        assert row["model_state_bytes"] == budget.model_states
        assert row["total_bytes"] == budget.total
        assert row["padding_bytes"] == budget.padding
        assert row["communication_buffer_bytes"] == budget.communication_buffers
        assert row["activation_bytes"] == budget.activations > 0
        assert row["save_copy_bytes"] == budget.save_copy == 0, "it ends before the first one is due"
        estimated = model_states(psi, training, stage).total
        assert row["model_state_bytes"] == estimated + row["tile_rounding_bytes"]
        # Three ranks and four micro-batches: in the last round it matters who owns a tile more or less.
        assert row["wire_elements_per_rank"] == pytest.approx(
            float(sum(wire_elements(psi, training, stage).values())), rel=1e-2 if workers == 3 else 1e-12
        )
    assert (told["job"], told["stage"], told["dp"]) == (spec.name, spec.zero.stage, workers)
    assert "notes" not in told


def test_a_job_that_saves_while_it_trains_has_a_copy_for_it(tmp_path: Path) -> None:
    fields = SPEC | {"checkpoints": {"every_steps": 5}}
    path = tmp_path / "saving.yaml"
    path.write_text(yaml.safe_dump(fields))
    told, budget = _json(tmp_path, str(path)), plan(JobSpec.model_validate(fields), None).per_rank
    assert budget is not None
    assert {told[str(stage)]["save_copy_bytes"] for stage in STAGES} == {budget.save_copy}
    assert budget.save_copy > 0
    path.write_text(yaml.safe_dump(fields | {"checkpoints": {"every_steps": 5, "asynchronous": False}}))
    without = _json(tmp_path, str(path))
    for stage in map(str, STAGES):
        assert told[stage]["total_bytes"] - without[stage]["total_bytes"] == budget.save_copy


def test_a_job_on_more_ranks_than_it_may_have_is_planned_and_told(job: Path, tmp_path: Path) -> None:
    told = _json(tmp_path, str(job), "--dp", "64")
    assert told["dp"] == 64
    assert "ask for at most 3" in told["notes"][0]
    assert _json(tmp_path, str(job))["dp"] == 2, "workers.wanted"


def test_what_fits_beside_a_job_s_buffers(job: Path, tmp_path: Path) -> None:
    row = _json(tmp_path, str(job), "--device-bytes", "1GiB")["2"]
    training = Training(dp=2, precision="fp32", micro_batches=4)
    found, beside = row["largest_model_parameters"], row["total_bytes"] - row["model_state_bytes"]
    assert model_states(found, training, 2).total + beside <= 1 << 30
    assert model_states(found + 1, training, 2).total + beside > 1 << 30


def test_as_a_table(job: Path, tmp_path: Path) -> None:
    shown = _run(tmp_path, "--params", "7.5B", "--dp", "64", "--device-bytes", "32GB").stdout
    for expected in ("7,500,000,000 parameters", "31.41 GB", "14.77e9", "128.00e9"):
        assert expected in shown
    shown = _run(tmp_path, str(job), "--dp", "4").stdout
    for expected in (
        "2 (the job's)",
        "tile rounding",
        "padding",
        "communication buffers",
        "ask for at most 3",
    ):
        assert expected in shown


def test_wrong_usage_is_told_and_ends_with_2(job: Path, tmp_path: Path) -> None:
    for arguments, expected in (
        ((), "give a job FILE"),
        (("--params", "many"), "--params 'many' is no number; give parameters, such as 7.5e9"),
        (("--params", "0"), "'0' does not lie between 1 and 1e+18"),
        (("--params", "1e999"), "does not lie between"),
        (("--params", "-7"), "'-7' is no number"),
        (("--params", "nan"), "'nan' is no number"),
        (("--params", "1.5"), "'1.5' is not a whole number"),
        (("--params", "7", "--dp", "0"), "--dp is 0; it must be at least 1"),
        ((str(job), "--dp", "-1"), "--dp is -1"),
        (("--params", "7", "--precision", "int4"), "'int4' must be one of"),
        (("--params", "7", "--optimizer", "lion"), "'lion' must be one of"),
        (("--params", "7", "--device-bytes", "3XB"), "--device-bytes '3XB' is no number; give bytes"),
        (("--params", "7", "--batch", "3"), "also need --layers, --hidden, --sequence"),
        (("--params", "7", *TRANSFORMER, "--host-checkpoints"), "add --checkpointing"),
        ((*TRANSFORMER, "--checkpointing", "--partition-activations"), "mp is 1; raise mp"),
        ((str(job), "--params", "7", "--mp", "2"), "leave out --params, --mp"),
        (("--fits",), "give its FILE"),
        ((str(job), "--fits", "--dp", "2"), "leave out --dp"),
    ):
        result = _run(tmp_path, *arguments)
        assert result.exit_code == WRONG_USAGE, arguments
        assert expected in " ".join(result.stderr.split()), arguments
        assert result.stdout == ""


def test_a_job_that_cannot_be_planned(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(SPEC | {"model": {"kind": "custom", "factory": "mine:Model"}}))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump(SPEC | {"steps": 0, "sed": 1}))
    for path, expected in (
        (own, "known only once it runs"),
        (wrong, "sed: Extra inputs"),
        (tmp_path / "absent.yaml", "cannot read"),
    ):
        result = _run(tmp_path, str(path), "--json")
        assert result.exit_code == FAILED
        assert expected in result.stderr


def test_only_asking_whether_it_fits_needs_a_service(job: Path, tmp_path: Path) -> None:
    assert _run(tmp_path, str(job)).exit_code == 0
    assert _run(tmp_path, str(job), "--fits").exit_code == UNREACHABLE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7.5e9", 7_500_000_000),
        ("7.5B", 7_500_000_000),
        ("124M", 124_000_000),
        ("1_000", 1000),
        ("1.5t", 15 * 10**11),
    ],
)
def test_parameters_as_people_write_them(text: str, expected: int) -> None:
    assert parameter_count(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("32e9", 32 * 10**9), ("32GB", 32 * 10**9), ("32 GiB", 32 << 30), ("1.5k", 1500), ("80G", 80 * 10**9)],
)
def test_bytes_as_people_write_them(text: str, expected: int) -> None:
    assert byte_count(text) == expected
    with pytest.raises(WrongUsage, match="7 parameters"):
        byte_count("7 parameters")


def test_planning_loads_neither_torch_nor_ray(job: Path) -> None:
    program = (
        "import sys\nfrom api.cli import app\n"
        "app(['plan', *sys.argv[1:], '--json'], standalone_mode=False)\n"
        "print({'torch', 'ray'} & set(sys.modules))"
    )
    for arguments in (("--params", "7.5e9", "--dp", "64"), (str(job),)):
        command = [sys.executable, "-c", program, *arguments]
        ended = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True)
        assert ended.stdout.splitlines()[-1] == "set()"
