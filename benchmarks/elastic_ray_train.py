"""Ray Train's elastic `TorchTrainer`, told from outside how many workers to have.

The training function is what Ray Train's guide shows: DDP over gloo, rank 0 reports a checkpoint of model
and optimizer every so many steps, a new group begins with `get_checkpoint`. Its controller, failure policy
and polling are at their defaults; only the scaling policy is ours, since the elastic one that Ray Train has
follows the cluster's resources and takes no orders.
"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from torch import nn

from benchmarks.elastic_model import MICRO_BATCH, SEQUENCE, build_model
from benchmarks.plan import VOCABULARY

RUN = "run"
"""The run's folder within the job's."""

_CHECKPOINT = "state.pt"


class Told(ScalingPolicy):
    """As many workers as a file says: `workers` while all is well, `after_loss` after a failure."""

    def __init__(self, scaling_config: ScalingConfig, orders: Path) -> None:
        super().__init__(scaling_config)
        self._orders = orders
        self._started = False

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        key = "after_loss" if self._started else "workers"
        self._started = True
        return self._resize(json.loads(self._orders.read_text(encoding="utf-8"))[key])

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        del worker_group_status
        wanted = json.loads(self._orders.read_text(encoding="utf-8"))["workers"]
        return NoopDecision() if wanted == worker_group_state.num_workers else self._resize(wanted)

    def _resize(self, workers: int) -> ResizeDecision:
        resources = self.scaling_config._resources_per_worker_not_none
        return ResizeDecision(num_workers=workers, resources_per_worker=resources)

    def _get_num_workers_for_resource_request(self) -> int:
        return self.scaling_config.max_workers


class ToldTrainer(TorchTrainer):
    """A `TorchTrainer` whose controller has the policy above."""

    def __init__(self, *args: Any, orders: Path, **options: Any) -> None:
        super().__init__(*args, **options)
        self._orders = orders

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        arguments["scaling_policy"] = Told(self.scaling_config, self._orders)
        return super()._initialize_and_run_controller(**arguments)


def trainer(
    folder: Path, *, size: str, micro_batches: int, workers: tuple[int, int], checkpoint_every: int
) -> ToldTrainer:
    """A job in `folder`, where `orders.json` must lie before it is started with `fit`.

    workers           fewest and most
    checkpoint_every  steps between two reports. A report waits until the controller has taken the one before,
                      which it does every 2 s, so reporting every step would only slow the job down
    """
    return ToldTrainer(
        train,
        train_loop_config={
            "size": size,
            "micro_batches": micro_batches,
            "checkpoint_every": checkpoint_every,
            "folder": str(folder),
        },
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=RUN,
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
        orders=folder / "orders.json",
    )


def train(config: dict[str, Any]) -> None:
    """The training function of one worker: steps until the file `stop` is there."""
    torch.set_num_threads(1)
    model, optimizer, step = _resume(config["size"])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    born = torch.tensor([time.time_ns()])
    dist.broadcast(born, 0)
    folder = Path(config["folder"])
    own = {"generation": int(born), "rank": rank, "world_size": world_size, "pid": os.getpid()}
    mine = [number for number in range(config["micro_batches"]) if number % world_size == rank]
    stop = False
    with (folder / f"steps-{int(born)}-{rank}.jsonl").open("a", buffering=1, encoding="utf-8") as rows:
        while not stop:
            began_s, step = time.time(), step + 1
            votes = _step(model, optimizer, step, mine, config["micro_batches"], (folder / "stop").exists())
            times = {"began_s": began_s, "ended_s": time.time()}
            rows.write(json.dumps({**own, **times, "step": step}) + "\n")
            stop = votes > 0
            if step % config["checkpoint_every"] == 0:
                began_s = time.time()
                _report(model, optimizer, step, rank)
                times = {"began_s": began_s, "ended_s": time.time()}
                rows.write(json.dumps({**own, **times, "step": step}) + "\n")


def _resume(size: str) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Model, optimizer and finished steps, from the last checkpoint if there is one."""
    model = build_model(size)
    checkpoint, state = ray.train.get_checkpoint(), None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / _CHECKPOINT, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
    model = ray.train.torch.prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["step"] if state is not None else 0


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, mine: list[int], count: int, stop: bool
) -> float:
    """One step over this rank's micro-batches; returns how many ranks have seen the wish to stop."""
    votes = torch.tensor([0.0, float(stop)])
    for place, number in enumerate(mine):
        model.require_backward_grad_sync = place == len(mine) - 1  # what DDP's no_sync() does
        loss = model(*_batch(step, number)) * (dist.get_world_size() / count)
        loss.backward()
        votes[0] += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(votes)
    return float(votes[1])


def _batch(step: int, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, targets), int64 [MICRO_BATCH, SEQUENCE]."""
    generator = torch.Generator().manual_seed(1_000 * step + micro_batch)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _report(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    whole = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if rank != 0:
        ray.train.report({"step": step}, checkpoint=None)
        return
    state = {"model": whole.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / _CHECKPOINT)
        ray.train.report({"step": step}, checkpoint=Checkpoint.from_directory(folder))
