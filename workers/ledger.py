"""Which ranks have told which steps, and the reports of those that were lost before they could.

A group that goes on after a loss may go on from a step that the lost rank had finished but not told, and that
nobody repeats. All that matters of its report is known: what all ranks share, and which samples it read.
Pure; knows neither Ray nor the log.
"""

from collections.abc import Sequence
from typing import Any

from workers.order import FROM_THE_START, Origin, SampleOrder
from workers.reports import MemoryUse
from workers.spec import JobSpec

_NOTHING = MemoryUse(parameters=0, gradients=0, optimizer_states=0, communication_buffers=0, activations=0)


class Ledger:
    """The steps of the newest generation that some of its ranks have not told yet."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._workers: tuple[str, ...] = ()
        self._open: dict[int, dict[int, dict[str, Any]]] = {}

    def begin(self, workers: Sequence[str]) -> None:
        """A generation begins, with these workers in rank order; what the last one left open is forgotten."""
        self._workers = tuple(workers)
        self._open.clear()

    def told(self, report: dict[str, Any]) -> None:
        """A rank of this generation has told a step."""
        step: int = report["step"]
        ranks = self._open.setdefault(step, {})
        ranks[report["rank"]] = report
        if len(ranks) == len(self._workers):
            del self._open[step]

    def rebuild(self, through: int, *, samples: int, origin: Origin = FROM_THE_START) -> list[dict[str, Any]]:
        """The reports, by step and rank, that are missing of steps up to and with `through`.

        samples: how many the data have; origin: from where the job counts its places. Only steps that some
        rank has told: of the others nothing counts.
        """
        order = SampleOrder(samples, self._spec.seed)
        return [
            self._report(step, rank, next(iter(ranks.values())), order, origin)
            for step, ranks in sorted(self._open.items())
            for rank in range(len(self._workers))
            if step <= through and rank not in ranks
        ]

    def _report(
        self, step: int, rank: int, other: dict[str, Any], order: SampleOrder, origin: Origin
    ) -> dict[str, Any]:
        spec = self._spec
        read = [
            int(sample)
            for number in range(rank, spec.micro_batches, len(self._workers))
            for sample in order.micro_batch(
                step - 1,
                number,
                global_batch=spec.global_batch,
                micro_batch=spec.micro_batch,
                origin=origin,
            )
        ]
        return {
            **other,
            "rank": rank,
            "worker": self._workers[rank],
            "tokens": len(read) * spec.sequence_length,
            "samples": read if spec.sample_ledger else None,
            "step_s": 0.0,
            "seconds": {},
            "bytes_sent": {},
            "bytes_by_transport": {},
            "memory": _NOTHING,
            "predicted": _NOTHING,
            "resident_bytes": 0,
            "rebuilt": True,
        }
