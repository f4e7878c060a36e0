"""DeepSpeed as a contestant: whether it can run here, and how it is set up. Imported only where it is used.

Its settings are its own defaults but for three, which would make it train something else or hold more than it
needs: gradients are not clipped (the default is norm 1.0), the bucket has 1e7 elements (the default of 5e8
reserves 2 GB), and nothing is printed.
"""

import logging
import os
import sys
import warnings
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

_BUCKET_ELEMENTS = 10_000_000


def version() -> str | None:
    """The installed version, or None."""
    return metadata.version("deepspeed") if util.find_spec("deepspeed") else None


def load() -> Any:
    """Import it in a rank, for CPU and quietly.

    Its ops are compiled by ninja at first use, so ninja must be found; and it wants the launcher's variables.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    own = str(Path(sys.executable).parent)
    if own not in os.environ["PATH"].split(":"):
        os.environ["PATH"] = f"{own}:{os.environ['PATH']}"
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # its compiler driver prints
    warnings.filterwarnings("ignore")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    return deepspeed


def initialise(
    model: nn.Module, groups: list[dict[str, Any]], *, stage: int, precision: str, adamw: dict[str, Any]
) -> Any:
    """DeepSpeed's engine around `model`, in the process group that exists."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only its own throughput figures depend on it
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": _BUCKET_ELEMENTS},
        "optimizer": {"type": "AdamW", "params": adamw},
        "steps_per_print": 10**9,
    }
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    engine, *_ = load().initialize(model=model, model_parameters=groups, config=config)
    return engine


def build_ops(_rank: int, _world_size: int) -> None:
    """Compile what it needs, once and beforehand, so that no measured run waits for a compiler."""
    model = nn.Linear(8, 8)
    groups = [{"params": list(model.parameters())}]
    initialise(model, groups, stage=2, precision="fp32", adamw={"lr": 1e-3})
