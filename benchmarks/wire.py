"""Bytes on the wire: every rank on a host of its own (a network namespace), counted by its interface.

On one host ranks may share memory, and a loopback then says nothing of what a network would carry. Beyond
the data the interface counts headers (0.1 to 0.4%: packets hold up to 64 KiB, as no real wire cuts them),
acknowledgements, gloo's own few words before each message, and the step's small collective.
"""

from dataclasses import dataclass

import torch.distributed as dist

from benchmarks.contestants import ours
from benchmarks.measure import batch, build_model
from tests.distributed.namespaces import refusal, sent, separate_hosts
from tests.distributed.ranks import run_ranks

STAGES = (0, 1, 2, 3)
_STEPS = 2
_TIMEOUT_S = 600.0
_ITEM_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireResult:
    """Bytes that a rank sent in a step of one stage, mean over ranks.

    counted  by the interface, all headers and acknowledgements included
    payload  of these, what TCP carried
    ledger   by the engine
    promised 2 psi (N - 1) / N elements at stages 0 to 2, 3 psi (N - 1) / N at stage 3
    """

    precision: str
    size: str
    world_size: int
    stage: int
    counted: float
    payload: float
    ledger: float
    promised: float


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
        trainee = ours(stage, precision)(model)
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
