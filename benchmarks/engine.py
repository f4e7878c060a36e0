"""The engine's stages beside DDP, ZeroRedundancyOptimizer and FSDP2, in interleaved rounds of one run.

    python -m benchmarks.engine --sizes 10M --worlds 2 --rounds 3

Each cell runs in fresh processes over loopback (gloo), one torch thread per rank. The table gives the median
step time as a ratio to DDP's of the same precision in the same run, bytes sent as the interface counts them
where only this run uses the interface, and the peak of resident memory beyond the imports. The losses of all
contestants of a precision must agree, or the run fails.
"""

import argparse
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SIZES = {  # name: layers, hidden, heads; vocabulary 8192, sequence 128, head not tied
    "10M": (4, 320, 5),
    "50M": (8, 640, 10),
    "124M": (16, 768, 12),
}
VOCABULARY, SEQUENCE, MICRO_BATCH = 8192, 128, 2
RESULTS = Path(__file__).parent / "results"

_context = get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.contestants", "workers.models"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10M"])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=None, help="names of contestants, e.g. 'stage 2' ddp")
    options = parser.parse_args()
    from benchmarks.contestants import contestants

    chosen = [c for c in contestants() if options.only is None or c.name in options.only]
    lines = _heading()
    for size in options.sizes:
        for world in options.worlds:
            cells: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
            for round_number in range(options.rounds):
                for contestant in chosen:
                    key = contestant.name, contestant.precision
                    cells[key].append(_run(key, size, world, options.steps, options.warmup))
                    step_ms = cells[key][-1]["step_s"] * 1e3
                    print(f"{size} N={world} round {round_number}: {key} {step_ms:.0f} ms")
            lines += _table(size, world, cells)
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"engine-{datetime.now(UTC):%Y-%m-%d-%H%M}.md").write_text(text)


def _heading() -> list[str]:
    import torch

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return [
        f"# Engines side by side, {datetime.now(UTC):%Y-%m-%d}",
        "",
        f"{os.cpu_count()} cores ({platform.processor() or platform.machine()}), {memory:.0f} GiB, "
        f"Python {platform.python_version()}, torch {torch.__version__}; one thread per rank, loopback.",
        f"Command: `python -m benchmarks.engine {' '.join(sys.argv[1:])}`",
    ]


def _table(size: str, world: int, cells: dict[tuple[str, str], list[dict[str, Any]]]) -> list[str]:
    lines = [
        "",
        f"## {size}, N = {world}",
        "",
        "| precision | engine | step, ms | ratio to DDP | bytes sent / 4 psi | peak memory, MB | last loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for precision in ("fp32", "bf16"):
        base = cells.get(("ddp" if precision == "fp32" else "ddp+master", precision))
        losses = []
        for (name, of), rounds in cells.items():
            if of != precision:
                continue
            step_s = statistics.median(r["step_s"] for r in rounds)
            ratio = statistics.median(
                r["step_s"] / b["step_s"] for r, b in zip(rounds, base or rounds, strict=True)
            )
            last = rounds[-1]
            if name != "floor":
                losses.append(last["loss"])
            lines.append(
                f"| {precision} | {name} | {step_s * 1e3:.0f} | {ratio:.2f} | {last['sent_over_4psi']:.2f} "
                f"| {last['peak_mb']:.0f} | {last['loss']:.5f} |"
            )
        tolerance = 1e-4 if precision == "fp32" else 2e-2
        if losses and max(losses) - min(losses) > tolerance * max(losses):
            raise SystemExit(f"{size} N={world} {precision}: losses disagree: {losses}")
    return lines


def _run(key: tuple[str, str], size: str, world: int, steps: int, warmup: int) -> dict[str, Any]:
    """One contestant in fresh processes; rank 0's figures, losses and bytes averaged over ranks."""
    queue, results = _context.Queue(), _context.Queue()
    ranks = [
        _context.Process(target=_rank, args=(rank, world, queue, results, key, size, steps, warmup))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    answers = [results.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join(30)
    failed = [answer for answer in answers if isinstance(answer, str)]
    if failed:
        raise SystemExit(f"{key} failed:\n{failed[0]}")
    return {
        "step_s": statistics.mean(a["step_s"] for a in answers),
        "loss": statistics.mean(a["loss"] for a in answers),
        "peak_mb": max(a["peak_mb"] for a in answers),
        "sent_over_4psi": answers[0]["sent"] / world / steps / (4 * answers[0]["psi"]),
    }


def _rank(
    rank: int, world: int, queue: Any, results: Any, key: tuple[str, str], size: str, steps: int, warmup: int
) -> None:
    import traceback

    try:
        results.put(_measure(rank, world, queue, key, size, steps, warmup))
    except BaseException:
        results.put(traceback.format_exc())


def _measure(
    rank: int, world: int, queue: Any, key: tuple[str, str], size: str, steps: int, warmup: int
) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from benchmarks.contestants import contestants
    from workers.models import GPT
    from workers.spec import GPTModel

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    _join(rank, world, queue)
    layers, hidden, heads = SIZES[size]
    torch.manual_seed(0)
    base = _status_kb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    spec = GPTModel(layers=layers, hidden=hidden, heads=heads, vocabulary=VOCABULARY, tied_head=False)
    model = GPT(spec, sequence_length=SEQUENCE)
    psi = sum(p.numel() for p in model.parameters())
    step = next(c for c in contestants() if (c.name, c.precision) == key).build(model)
    times, losses, sent = [], [], 0
    for index in range(warmup + steps):
        if index == warmup:
            dist.barrier()
            sent = _loopback_bytes()
        inputs, targets = _batch(index, rank)
        began = time.perf_counter()
        losses.append(step(inputs, targets))
        if index >= warmup:
            times.append(time.perf_counter() - began)
    dist.barrier()
    sent = _loopback_bytes() - sent
    answer = {
        "step_s": statistics.median(times),
        "loss": losses[-1],
        "sent": sent,
        "psi": psi,
        "peak_mb": (_status_kb("VmHWM") - base) / 1024,
    }
    dist.destroy_process_group()
    return answer


def _join(rank: int, world: int, queue: Any) -> None:
    import torch.distributed as dist

    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        for _ in range(world - 1):
            queue.put(store.port)
    else:
        store = dist.TCPStore("127.0.0.1", queue.get(timeout=60), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _batch(step: int, rank: int) -> Any:
    """Half of every sequence repeats a short cycle, so that there is something to learn."""
    import torch

    generator = torch.Generator().manual_seed(1_000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator)
    tokens[:, ::2] = torch.arange(SEQUENCE // 2 + 1) * 7 % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _loopback_bytes() -> int:
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def _status_kb(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()
