"""Processes that outlive the groups they are in: joined, resized, killed, joined again among those left.

A *life* is a list of acts. In each act some of the processes form a group, take the state over from what the
members of the act before hold, and train up to a step, where they leave in peace or where one kills itself.
The script is known to all beforehand, so that nobody has to ask who is dead.
"""

import hashlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from zero_core.config import ZeroConfig

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "zero_core.engine", "zero_core.reshard"])

PATIENCE_S = 120.0


@dataclass(frozen=True)
class Act:
    """One group.

    members  its processes; a member's rank is its place
    until    the step after which all leave in peace, if nobody dies before
    kills    who kills itself in which step, and where: see `strike`
    moving   who kills itself in the middle of the handover at the beginning of this act
    """

    members: tuple[int, ...]
    until: int
    kills: dict[int, tuple[int, str]] = field(default_factory=dict)
    moving: tuple[int, ...] = ()

    @property
    def dead(self) -> set[int]:
        return {*self.kills, *self.moving}


@dataclass
class Diary:
    """What a process saw.

    losses    by step, exact, each time it was computed
    repeated  steps that were finished and had to be computed again, by act
    finished  the last step that was finished
    seconds, sent, memory  of the last step; bytes of replicas at the end, measured and predicted
    taken     the outcome of each handover, by act
    digest    of masters and moments at the end, from the last act's rank 0
    errors    what handovers raised, by act
    """

    losses: list[tuple[int, str]] = field(default_factory=list)
    repeated: dict[int, int] = field(default_factory=dict)
    finished: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    memory: tuple[int, int] = (0, 0)
    taken: dict[int, Any] = field(default_factory=dict)
    digest: str = ""
    errors: dict[int, str] = field(default_factory=dict)
    buffers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Script:
    """`build()` makes the module, `train(engine, step)` computes a step's micro-batches."""

    acts: tuple[Act, ...]
    config: ZeroConfig
    build: Callable[[], Any]
    train: Callable[[Any, int], None]


def play(processes: int, script: Script, *, timeout_s: float = 240.0) -> dict[int, Diary]:
    """Run the script; the diaries of those that lived to the end. Raises AssertionError with a traceback."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    doomed = set().union(*(act.dead for act in script.acts))
    pipes, started = {}, []
    for worker in range(processes):
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_main, args=(worker, store.port, theirs, script))
        process.start()
        theirs.close()
        pipes[worker] = mine
        started.append(process)
    diaries: dict[int, Diary] = {}
    try:
        while pipes:
            ready = wait(list(pipes.values()), timeout_s)
            assert ready, f"processes {sorted(pipes)} gave no answer in {timeout_s} s"
            for worker in [w for w, pipe in pipes.items() if pipe in ready]:
                pipe = pipes.pop(worker)
                try:
                    failure, diary = pipe.recv()
                except EOFError:
                    assert worker in doomed, f"process {worker} died without being told to"
                    continue
                assert not failure, f"process {worker}:\n{failure}"
                assert worker not in doomed, f"process {worker} was to die and did not"
                diaries[worker] = diary
    finally:
        for process in started:
            process.kill()
            process.join()
            process.close()
    return diaries


def strike(engine: Any, where: str) -> None:
    """Let this process be killed in its next step.

    forward   in the middle of it            reduce    with some reductions done
    half      having told its vote to one rank only
    voted     when all have voted, before the update
    update    with some units updated        gather    after the update, before parameters are shared
    replica   in the middle of the copy of its states
    """

    from zero_core import assembly

    def die(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def at_call(owner: Any, name: str, number: int) -> None:
        real, calls = getattr(owner, name), [0]

        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            return die() if calls[0] == number else real(*args, **kwargs)

        setattr(owner, name, counted)

    if where == "forward":
        engine.module.register_forward_hook(die)
    elif where == "reduce":
        at_call(engine.collectives, "begin_reduce", 3)
    elif where == "half":
        _half_told(engine, die)
    elif where == "voted":
        assembly.held_gradients = die
    elif where == "update":
        at_call(engine.optimizer, "_update", 2)
    elif where == "gather":
        assembly.share_parameters = die
    elif where == "replica":
        _half_copied(engine._live._replicas, die)
    else:
        raise ValueError(where)


def _half_copied(replicas: Any, die: Callable[..., Any]) -> None:
    def copy(number: int, slot: Any) -> None:
        run, at = replicas._copies[number]
        half = run.numel() // 2
        slot.memory[at : at + half].copy_(run[:half])
        die()

    replicas._copy = copy


def _half_told(engine: Any, die: Callable[..., Any]) -> None:
    """Of the links to ranks of this host all but the first are dead when the step's numbers are told."""
    from zero_core.links import Kind, LocalLink, Purpose

    first, real = next(iter(engine.collectives._near)), LocalLink.tell

    def tell(link: Any, notice: Any, *, at_once: bool) -> None:
        if notice.kind is Kind.NUMBERS and notice.unit == Purpose.STEP and link.peer != first:
            die()
        real(link, notice, at_once=at_once)

    LocalLink.tell = tell  # type: ignore[method-assign]


class _Process:
    def __init__(self, worker: int, port: int, script: Script) -> None:
        import torch.distributed as dist

        self.worker = worker
        self.script = script
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self.module = script.build()
        self.diary = Diary()
        self.held: list[Any] = []
        self.engine: Any = None

    def live(self) -> Diary:
        before: tuple[int, ...] = ()
        buried: set[int] = set()
        for number, act in enumerate(self.script.acts):
            leavers = tuple(w for w in before if w not in act.members and w not in buried)
            if self.worker in act.members + leavers:
                self._act(number, act, leavers)
            # Those that hold something: after a handover that failed, its members and those before, and so
            # where the new group may have lost somebody before it had replicas of its own.
            before = (*act.members, *(leavers if act.moving or self.script.config.replicas else ()))
            buried |= act.dead
        return self.diary

    def _act(self, number: int, act: Act, leavers: tuple[int, ...]) -> None:
        import torch.distributed as dist

        from zero_core import ZeroEngine
        from zero_core.errors import NothingHeldError, PeerLostError, ReshardError
        from zero_core.reshard import take_over

        everyone = act.members + leavers
        met = dist.PrefixStore(f"act-{number}", self.store)
        patience = timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "gloo", store=met, rank=everyone.index(self.worker), world_size=len(everyone), timeout=patience
        )
        self.engine = None
        try:
            group = dist.new_group(range(len(act.members))) if leavers else dist.group.WORLD
            if self.worker in act.members:
                self.engine = ZeroEngine(
                    self.module, self.script.config, group=group, generation=number, blank=number > 0
                )
            if number:
                if self.worker in act.moving:
                    _die_while_moving()
                try:
                    taken = take_over(self.engine, self.held, group=dist.group.WORLD)
                except NothingHeldError as error:
                    self.diary.errors[number] = str(error)
                    return
                self.diary.taken[number] = taken
                self.diary.repeated[number] = max(0, self.diary.finished - taken.step)
                self._let_go()
            if self.engine is not None:
                self._train(act)
                if number == len(self.script.acts) - 1:
                    self._conclude()
        except (PeerLostError, RuntimeError, ReshardError) as error:
            if not act.dead:
                raise
            self.diary.errors[number] = repr(error)
            report = None if self.engine is None else self.engine.interrupted_report
            if report is not None:
                self.diary.losses.append((report.step, report.loss.hex()))
        finally:
            if self.engine is not None:
                self.held = [*self.held, *self.engine.snapshots()]
                self.engine.detach()
                self.engine = None
            _leave()

    def _train(self, act: Act) -> None:
        engine = self.engine
        while engine.steps_done < act.until:
            if act.kills.get(self.worker, (0, ""))[0] == engine.steps_done + 1:
                strike(engine, act.kills[self.worker][1])
            self.script.train(engine, engine.steps_done)
            report = engine.step()
            self.diary.losses.append((report.step, report.loss.hex()))
            self.diary.finished = report.step
            self.diary.seconds = report.seconds
            self.diary.sent = report.bytes_sent
            self._let_go()

    def _let_go(self) -> None:
        """Without replicas what was held can go once it is taken over; with them, once there are new ones."""
        if not self.script.config.replicas or (self.engine and self.engine.replicated_step is not None):
            self.held = []

    def _conclude(self) -> None:
        self.diary.digest = digest(self.engine)
        self.diary.memory = self.engine.memory().replicas, self.engine.budget.replicas
        kept = self.engine.module.state_dict(keep_vars=True)  # of which buffers are read
        self.diary.buffers = {n: kept[n].tolist() for n, _ in self.engine.module.named_buffers() if n in kept}


def digest(engine: Any) -> str:
    """SHA-256 of all masters and moments, whole. Collective."""
    import torch

    found = hashlib.sha256()
    for state in engine.optimizer.states:
        for kind in state.kinds:
            flat = torch.zeros(state.unit.padded)
            flat[state.start : state.stop] = getattr(state, kind)
            engine.collectives.gather_from_owners(
                flat, state.unit.chunk, state.unit.numel, kind="test", tag=0
            )
            found.update(flat[: state.unit.numel].numpy().tobytes())
    return found.hexdigest()


def _die_while_moving() -> None:
    """The next message of this process is its last deed."""
    import torch.distributed as dist

    def die(messages: Sequence[Any]) -> Any:
        dist.isend(messages[0].tensor, group=messages[0].group, group_dst=messages[0].group_peer, tag=1)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    dist.batch_isend_irecv = die


def _leave() -> None:
    """Give up the group, whole or broken; peers that wait for this one fail then."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD
    assert group is not None
    for peer in range(dist.get_world_size()):
        if peer != dist.get_rank():
            try:
                work = dist.irecv(torch.empty(1), src=peer, tag=1 << 30)
                if work is not None:
                    work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                continue  # the timeout closes all connections, which is what is wanted
    dist.destroy_process_group()


def _main(worker: int, port: int, pipe: Connection, script: Script) -> None:
    import torch

    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        pipe.send((None, _Process(worker, port, script).live()))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        pipe.close()
        os._exit(0)
