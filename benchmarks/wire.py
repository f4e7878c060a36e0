"""Bytes on the wire: every rank on a host of its own (a network namespace), counted by its interface.

On one host ranks may share memory, and a loopback then says nothing of what a network would carry. Beyond
the data the interface counts headers (0.1 to 0.4%: packets hold up to 64 KiB, as no real wire cuts them),
acknowledgements, gloo's own few words before each message, and the step's small collective.
"""

import torch.distributed as dist

from benchmarks.contestants import build
from benchmarks.measure import batch, build_model
from benchmarks.results import WireResult
from tests.distributed.namespaces import refusal, sent, separate_hosts
from tests.distributed.ranks import run_ranks

STAGES = (0, 1, 2, 3)
_STEPS = 2
_TIMEOUT_S = 600.0
_ITEM_BYTES = {"fp32": 4, "bf16": 2}


def measure_wire(precision: str, size: str, world_size: int) -> list[WireResult]:
    """All stages, one after the other. Needs what `refusal` asks for; raises RankFailedError."""
    with separate_hosts(world_size) as hosts:
        ranks = run_ranks(
            world_size, _steps, precision, size, hosts[0].interface, timeout_s=_TIMEOUT_S, hosts=hosts
        )
    share = (world_size - 1) / world_size * _ITEM_BYTES[precision]
    found = []
    for stage in STAGES:
        figures = [[value / _STEPS / world_size for value in rank[stage]] for rank in ranks]
        counted, payload, ledger = (sum(column) for column in zip(*figures, strict=True))
        psi = ranks[0]["psi"]
        found.append(
            WireResult(
                precision=precision,
                size=size,
                world_size=world_size,
                stage=stage,
                counted=counted,
                payload=payload,
                ledger=ledger,
                promised=(3 if stage == 3 else 2) * psi * share,
            )
        )
    return found


def why_not() -> str | None:
    """Why the wire cannot be measured here; None if it can."""
    return refusal()


def _steps(rank: int, _world_size: int, precision: str, size: str, interface: str) -> dict[object, object]:
    """By stage: (bytes counted, payload, ledger) of this rank over all steps; and psi."""
    found: dict[object, object] = {}
    for stage in STAGES:
        model = build_model(size)
        found["psi"] = sum(p.numel() for p in model.parameters())
        trainee = build(f"stage {stage}", precision, model)
        trainee.step(*batch(0, rank))
        ledger = 0
        dist.barrier()
        before = sent(interface)
        for index in range(1, 1 + _STEPS):
            ledger += sum((trainee.step(*batch(index, rank)).bytes_sent or {}).values())
        dist.barrier()
        wire = sent(interface).since(before)
        found[stage] = wire.bytes, wire.payload, ledger
    return found
