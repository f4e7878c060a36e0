"""How long one of very many ranks takes to know what it has to read, and how large the manifest is then.

No file is there: a plan follows from the manifest alone.
"""

import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from benchmarks.checkpoint_results import PlanResult
from zero_core import ZeroConfig
from zero_core.checkpoint.container import digest, rank_contents
from zero_core.checkpoint.manifest import Manifest
from zero_core.checkpoint.reading import Reader, wants_of
from zero_core.layout import ParameterSpec, build_layout, module_units

RANKS, PARAMETERS = 2_048, 1_000
LOADED_AT = (1_024, 2_047, 4_096)
_BLOCKS = 100
_SHAPE = (4_096, 1_024)


def measure_plans(*, turns: int) -> PlanResult:
    """Plans for a rank in the middle, so many times; each the first that its process makes, as in a load."""
    text = _manifest().to_json()
    reads_s, plans_s = [], {ranks: list[float]() for ranks in LOADED_AT}
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(1, maxtasksperchild=1) as processes:
        for _ in range(turns):
            for ranks in LOADED_AT:
                read_s, plan_s = processes.apply(_first_plan, (text, ranks))
                reads_s.append(read_s)
                plans_s[ranks].append(plan_s)
    return PlanResult(
        saved_at=RANKS,
        parameters=PARAMETERS,
        manifest_bytes=len(text.encode()),
        reads_s=reads_s,
        plans_s=plans_s,
    )


def _first_plan(text: str, ranks: int) -> tuple[float, float]:
    """Seconds to parse and check the manifest, and to plan from there."""
    began = time.perf_counter()
    manifest = Manifest.from_json(text, "benchmark")
    parsed = time.perf_counter()
    wants = wants_of(manifest, manifest.layout.at(ranks), stage=3, rank=ranks // 2)
    reads = Reader(Path(), manifest).plan(wants)
    planned = time.perf_counter()
    assert sum(read.bytes for read in reads) >= sum(want.stop - want.start for want in wants) * 4
    return parsed - began, planned - parsed


def _manifest() -> Manifest:
    """Of a transformer of 4.2 billion elements: blocks of ten matrices, each block a unit."""
    names = [f"blocks.{index * _BLOCKS // PARAMETERS}.matrix{index}.weight" for index in range(PARAMETERS)]
    unit_of = module_units({f"blocks.{block}" for block in range(_BLOCKS)})
    parameters = [ParameterSpec(name, _SHAPE) for name in names]
    layout = build_layout(parameters, unit_of, tile=ZeroConfig().tile, world_size=RANKS)
    draft = Manifest(
        step=1,
        generation=1,
        stage=3,
        precision="fp32",
        layout=layout,
        kinds=("master", "momentum", "variance"),
        files=(),
        extra={},
        created=0.0,
        updates=1,
    )
    size = rank_contents(draft, 0).file_bytes
    return replace(draft, files=tuple((size, digest(str(file).encode())) for file in range(RANKS + 1)))
