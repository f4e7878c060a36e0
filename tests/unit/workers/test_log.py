"""The numbered log, and what a restarted controller makes of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.errors import LogError
from workers.log import History, JobLog
from workers.reports import Phase, log_entry


def _report(step: int, *, generation: int = 1) -> dict[str, Any]:
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer_states", "communication_buffers", "activations"), 1
    )
    return {
        "type": "report",
        "time": 100.0 + step,
        "generation": generation,
        "rank": 0,
        "world_size": 1,
        "worker": "w0",
        "step": step,
        "loss": 1.0,
        "lr": 0.1,
        "grad_norm": 1.0,
        "tokens": 8,
        "step_s": 0.1,
        "seconds": {},
        "bytes_sent": {},
        "memory": memory,
        "predicted": memory,
        "resident_bytes": 1,
        "samples": None,
    }


def _phase(phase: Phase, *, attempt: int = 1, wanted: int = 2, workers: int = 2) -> dict[str, Any]:
    return {"phase": phase, "reason": None, "attempt": attempt, "wanted": wanted, "workers": workers}


def _filled(path: Path) -> JobLog:
    log = JobLog(path, wall=lambda: 50.0)
    log.event("phase", 0, _phase(Phase.STARTING))
    log.event("phase", 1, _phase(Phase.RUNNING))
    log.reports([_report(step) for step in range(1, 6)])
    log.event("checkpoint", 1, {"step": 5, "productive_s": 0.5})
    return log


def test_entries_are_numbered_without_gaps_and_read_from_any_number(tmp_path: Path) -> None:
    log = _filled(tmp_path / "job" / "log.jsonl")
    entries = log.read(0, 100)
    assert [entry["seq"] for entry in entries] == list(range(1, 9))
    assert [type(log_entry.validate_python(entry)).__name__ for entry in entries][2:4] == ["RankReport"] * 2
    assert [entry["seq"] for entry in log.read(3, 2)] == [4, 5]
    assert log.read(8, 10) == log.read(99, 10) == log.read(2, 0) == []
    log.close()


def test_a_reopened_log_goes_on_with_the_numbers_and_remembers(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _filled(path).close()
    log = JobLog(path)
    assert log.history == History(
        last_seq=8,
        time=105.0,
        generation=1,
        step=5,
        attempt=1,
        phase=Phase.RUNNING,
        wanted=2,
        workers=2,
        began_at=50.0,
        saved_step=5,
        saved_productive_s=0.5,
    )
    log.reports([_report(6)])
    assert [entry["seq"] for entry in log.read(6, 10)] == [7, 8, 9]
    log.close()


@pytest.mark.parametrize("torn", [b"{", b'{"type":"event","seq":9,"time":1', b'{"type":"report","seq":9}'])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "log.jsonl"
    _filled(path).close()
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    log = JobLog(path)
    assert log.last_seq == 8
    assert path.read_bytes() == whole
    log.event("checkpoint", 1, {"step": 6})
    assert log.read(8, 1)[0]["seq"] == 9
    log.close()


def test_damage_elsewhere_is_an_error_and_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    _filled(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"garbage\n", *lines[2:]]))
    before = path.read_bytes()
    with pytest.raises(LogError, match="entry 2 is damaged"):
        JobLog(path)
    path.write_bytes(b"".join([lines[0], *lines[7:]]))
    with pytest.raises(LogError, match="line 2 carries the number 8"):
        JobLog(path)
    assert before != path.read_bytes()


def _history(*events: tuple[str, dict[str, Any]]) -> History:
    history = History()
    for seq, (kind, data) in enumerate(events, start=1):
        entry = {"type": "event", "seq": seq, "time": 1.0, "generation": 3, "kind": kind, "data": data}
        history = history.after(json.loads(json.dumps(entry)))
    return history


START = ("phase", _phase(Phase.STARTING))
LOSS = ("worker_lost", {"rank": 0, "worker": "w0", "step": 1, "cause": "gone"})


def test_a_resize_is_remembered_unless_it_was_refused() -> None:
    resize = ("command", {"kind": "resize", "workers": 7, "who": "me"})
    assert _history(START, resize).wanted == 7
    refused = ("resize_refused", {"who": "me", "wanted": 7, "workers": 2, "reason": "no room"})
    assert _history(START, resize, refused).wanted == 2


def test_open_orders_and_losses_belong_to_their_attempt() -> None:
    cancel = ("command", {"kind": "cancel", "who": "me"})
    late = ("command", {"kind": "cancel", "who": "me", "refused": "the job is paused"})
    pause = ("command", {"kind": "pause", "who": "you"})
    history = _history(START, LOSS, LOSS, pause, cancel)
    assert (history.losses, history.pause, history.cancel) == (2, "you", "me")
    resumed = _history(START, LOSS, pause, late, ("phase", _phase(Phase.STARTING, attempt=2, wanted=5)))
    assert (resumed.attempt, resumed.losses, resumed.pause, resumed.cancel) == (2, 0, None, None)
    assert (resumed.wanted, resumed.generation) == (5, 3)


def test_the_workers_of_a_lost_node_count_as_one_lost_node() -> None:
    def on(node: str) -> tuple[str, dict[str, Any]]:
        data = {"rank": 0, "worker": "w0", "step": 1, "cause": "gone", "budget": "node", "node": node}
        return "worker_lost", data

    history = _history(START, LOSS, on("a"), on("a"), on("b"))
    assert (history.losses, history.nodes_lost) == (1, frozenset({"a", "b"}))


def test_the_log_on_disk_is_the_whole_truth(tmp_path: Path) -> None:
    """A second reader (the service's, another process's) sees an event as soon as the call has returned."""
    path = tmp_path / "log.jsonl"
    log = _filled(path)
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "checkpoint"
    log.close()
