# `make demo` and `make test` are the front door; both set up what they need in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check format bench-engine bench-peers bench-elastic bench-checkpoint docs clean

demo: $(READY)  ## the main job, end to end, on this machine
	$(BIN)/elastic-zero demo

test: check  ## all checks, then all tests, two files at a time but for those that make hosts or chaos
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/distributed
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/browser tests/integration
	$(BIN)/python -m pytest tests/multihost tests/chaos tests/gpu

check: $(READY)  ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-engine: $(READY)  ## the engine beside its peers; writes a dated table to benchmarks/results/
	$(BIN)/python -m benchmarks.engine $(ARGS)

bench-peers: $(READY)  ## DeepSpeed for bench-engine; its build needs the torch that is installed, and a compiler
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable ".[bench]"

bench-elastic: $(READY)  ## resizes, recoveries and replicas beside Ray Train; writes a dated table, too
	$(BIN)/python -m benchmarks.elastic $(ARGS)

bench-checkpoint: $(READY)  ## saves and loads beside torch.distributed.checkpoint; writes a dated table, too
	$(BIN)/python -m benchmarks.checkpoint $(ARGS)

docs: $(READY)  ## regenerate the reference pages from the code
	$(BIN)/python -m docs.generate

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"elastic-zero needs Python 3.11 to 3.13; {sys.executable} is {sys.version.split()[0]}. Set PYTHON=...") if not (3, 11) <= sys.version_info[:2] <= (3, 13) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@
