"""What a process does once, before it may join: a small step in a group of its own, and a handover.

The first group, the first engine and the first backward of a process load libraries, start threads and fill
caches, which takes longer than a whole change of groups. A joiner does it while the others train.
"""

from dataclasses import replace

import torch
from torch import nn

from workers.engine_config import engine_config
from workers.rendezvous import Rendezvous
from workers.spec import JobSpec
from zero_core import ZeroEngine, reshard
from zero_core.config import LossScale

_WIDTH = 8
_TIMEOUT_S = 60.0


def warm_up(spec: JobSpec, rendezvous: Rendezvous, device: torch.device) -> int:
    """Form a group of one, train one step with the job's settings, take it over, leave. Not collective.

    Returns the bytes that this process occupies without a model, for the memory reports of its engines.
    """
    groups = rendezvous.form(
        generation=0, rank=0, world_size=1, store=rendezvous.host(), collective_timeout_s=_TIMEOUT_S
    )
    try:
        settings = replace(
            engine_config(spec), micro_batches=1, groups=(), loss_scale=LossScale(initial=1.0, floor=1.0)
        )
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model = nn.Sequential(nn.Embedding(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
            engine = ZeroEngine(model, settings, device=device, group=groups.training)
            try:
                tokens = torch.arange(_WIDTH, device=device)
                engine.backward(nn.functional.cross_entropy(engine(tokens).float(), tokens))
                engine.step()
                held = engine.snapshots()
            finally:
                engine.detach()
            again = ZeroEngine(model, settings, device=device, group=groups.training, blank=True)
            try:
                reshard.take_over(again, held, group=groups.everyone)
            finally:
                again.detach()
            baseline_bytes: int = engine.baseline_bytes
            return baseline_bytes
    finally:
        rendezvous.leave()
