"""Runs a function on N real processes that form one gloo group, and returns all answers.

They meet over loopback, or each on the host it is given (`namespaces`).
"""

import os
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.distributed.namespaces import Host, enter

_context = get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "zero_core.engine", "zero_core.checkpoint"])


class RankFailedError(Exception):
    """A rank raised, or died."""


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    hosts: Sequence[Host] | None = None,
    killed: Collection[int] = (),
) -> list[Any]:
    """Call `body(rank, world_size, *args)` on every rank; raise RankFailedError with the first traceback.

    `hosts` has one for each rank; without, they run where the caller does. Ranks in `killed` die in `body`:
    their result is None, and the others do not wait for them at the end.
    """
    port, pipes, processes = _context.Queue(), [], []
    for rank in range(world_size):
        mine, theirs = _context.Pipe(duplex=False)
        place = (hosts[rank], hosts[0].address) if hosts is not None else (None, "127.0.0.1")
        process = _context.Process(
            target=_rank_main, args=(rank, world_size, port, theirs, body, args, *place, not killed)
        )
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return _collect(pipes, timeout_s, killed)
    except RankFailedError:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        port.close()


def _collect(pipes: list[Connection], timeout_s: float, killed: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([p for i, p in enumerate(pipes) if i not in results], timeout_s)
        if not ready:
            raise RankFailedError(
                f"ranks {sorted(set(range(len(pipes))) - set(results))} gave no answer in {timeout_s} s"
            )
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                if rank in killed:
                    results[rank] = None
                    continue
                raise RankFailedError(f"rank {rank} died without an answer") from None
            if failure:
                raise RankFailedError(f"rank {rank}:\n{failure}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int,
    world_size: int,
    port: Any,
    pipe: Connection,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    host: Host | None,
    meet_at: str,
    together: bool,
) -> None:
    import torch
    import torch.distributed as dist

    try:
        if host is not None:
            enter(host)  # first of all: it needs a process that has no other thread yet
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = host.interface if host is not None else "lo"
        if rank == 0:
            store = dist.TCPStore(meet_at, 0, world_size, is_master=True, wait_for_workers=False)
            for _ in range(world_size - 1):
                port.put(store.port)
        else:
            store = dist.TCPStore(meet_at, port.get(timeout=60), world_size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = body(rank, world_size, *args)
        if together:
            dist.barrier()
        pipe.send((None, result))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        # Leave without torch's exit handlers, which may wait for peers that failed.
        os._exit(0)
