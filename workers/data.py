"""What a job is trained on: text as bytes, a flat file of token ids, or synthetic tokens.

Sample i is the window of sequence_length + 1 tokens that starts at i * sequence_length, so that every token
but the first is predicted once in an epoch. Which samples micro-batch m of step s reads depends on
(seed, s, m) only: never on the rank or the world size. A position is the number of samples consumed before
it, one number for the whole job. numpy only; knows neither torch nor ranks.
"""

import glob
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from workers.errors import DataError, ResumeError
from workers.order import FROM_THE_START, Origin, SampleOrder, mix
from workers.spec import JobSpec, SyntheticData, TextData, TokenData

PYTHON = "python:"
"""The path that stands for the sources and documentation that ship with the running Python."""

_PYTHON_SUFFIXES = frozenset({".py", ".pyi", ".txt", ".rst", ".md"})
_WHOLE_DIGEST_BYTES = 64 << 20
_DIGEST_BLOCKS, _DIGEST_BLOCK_BYTES = 1024, 4096
_SYNTHETIC_VOCABULARY = 256

Tokens = NDArray[Any]


class Source(Protocol):
    """Something that has numbered samples of equal length."""

    @property
    def samples(self) -> int: ...

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples [len(ids), sequence_length + 1]."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """What tells this data from other data, JSON-ready."""
        ...


@dataclass(frozen=True, slots=True)
class WindowSource:
    """Windows over one long run of tokens, in memory or memory-mapped."""

    kind: str
    tokens: Tokens
    window: int
    files: int

    @property
    def samples(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.window)

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.empty((len(ids), self.window + 1), dtype=np.int64)
        for row, sample in enumerate(ids):
            start = int(sample) * self.window
            found[row] = self.tokens[start : start + self.window + 1]
        return found

    def fingerprint(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "tokens": len(self.tokens),
            "dtype": str(self.tokens.dtype),
            "files": self.files,
            "digest": _digest(self.tokens),
        }


@dataclass(frozen=True, slots=True)
class SyntheticSource:
    """Random tokens; sample i depends on (seed, i) only."""

    samples: int
    window: int
    seed: int
    vocabulary: int

    def read(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        rows = [np.random.default_rng(mix(self.seed, int(sample))) for sample in ids]
        return np.stack([row.integers(0, self.vocabulary, self.window + 1) for row in rows])

    def fingerprint(self) -> dict[str, Any]:
        return {"kind": "synthetic", "samples": self.samples, "vocabulary": self.vocabulary}


class Batches:
    """The micro-batches of a job, by step and number."""

    def __init__(self, spec: JobSpec, source: Source, *, vocabulary: int | None) -> None:
        """Raises DataError if one step reads more samples than there are."""
        if source.samples < spec.global_batch:
            raise DataError(
                f"the data hold {source.samples} samples of {spec.sequence_length} (+ 1) tokens, fewer than "
                f"the {spec.global_batch} of one step: add data, or lower global_batch or sequence_length"
            )
        self._spec = spec
        self._source = source
        self._vocabulary = vocabulary
        self._order = SampleOrder(source.samples, spec.seed)
        self.origin = FROM_THE_START
        """From where places are counted; set once the state is there, and the same on all ranks."""

    def consumed(self, step: int) -> int:
        """Places used up before step `step` (from 0): where it begins. What checkpoints tell of the data."""
        return self.origin.place(step, global_batch=self._spec.global_batch)

    def ids(self, step: int, micro_batch: int) -> NDArray[np.int64]:
        """Ids of the samples that micro-batch `micro_batch` of step `step` (both from 0) reads."""
        spec = self._spec
        return self._order.micro_batch(
            step,
            micro_batch,
            global_batch=spec.global_batch,
            micro_batch=spec.micro_batch,
            origin=self.origin,
        )

    @property
    def samples(self) -> int:
        return self._source.samples

    def read(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(inputs, targets), both int64 [len(ids), sequence_length]; targets are one position ahead.

        Raises DataError for a token id outside of the model's vocabulary.
        """
        tokens = self._source.read(ids)
        if self._vocabulary is not None:
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self._vocabulary:
                raise DataError(
                    f"token id {low if low < 0 else high} in samples {ids.tolist()} is outside of the "
                    f"model's vocabulary of {self._vocabulary}: raise model.vocabulary, or check data.dtype"
                )
        return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be gone on from; JSON-ready. Read from the data once."""
        return {
            **self._source.fingerprint(),
            "seed": self._spec.seed,
            "sequence_length": self._spec.sequence_length,
            "global_batch": self._spec.global_batch,
        }


def open_batches(spec: JobSpec, *, vocabulary: int | None) -> Batches:
    """Open the job's data. Raises DataError if they cannot be read or are too short."""
    data = spec.data
    if isinstance(data, SyntheticData):
        source: Source = SyntheticSource(
            data.samples, spec.sequence_length, spec.seed, vocabulary or _SYNTHETIC_VOCABULARY
        )
    elif isinstance(data, TokenData):
        source = WindowSource("tokens", _map_tokens(data), spec.sequence_length, 1)
    else:
        tokens, files = _read_text(data)
        source = WindowSource("text", tokens, spec.sequence_length, files)
    return Batches(spec, source, vocabulary=vocabulary)


def check_resume(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Refuse to go on from a checkpoint of other data.

    Raises ResumeError naming every field that differs: with other data, or another length, seed or batch, the
    samples after the checkpoint would silently be others than those the job had still to see.
    """
    differing = sorted(key for key in saved.keys() | current.keys() if saved.get(key) != current.get(key))
    if differing:
        details = ", ".join(f"{key}: {saved.get(key)!r} then, {current.get(key)!r} now" for key in differing)
        raise ResumeError(
            f"the checkpoint was made with other data ({details}); restore them, or submit a new job"
        )


def go_on_from(extra: dict[str, Any], batches: Batches, *, step: int) -> tuple[Origin, str | None]:
    """Where the data of a job begin that starts, at `step`, from another job's checkpoint.

    extra: what that checkpoint tells. The rule: with the same data, seed and sequence length the samples
    consumed so far stay consumed, whatever the global batch was and is now; with others the data begin at
    their start. Returns the origin, and in the second case why.
    """
    saved, current = dict(extra.get("data") or {}), dict(batches.fingerprint)
    consumed = extra.get("consumed")
    before = saved.pop("global_batch", None)
    current.pop("global_batch")
    if consumed is None and isinstance(before, int):
        consumed = step * before
    differing = sorted(key for key in saved.keys() | current.keys() if saved.get(key) != current.get(key))
    if not saved or not isinstance(consumed, int):
        return Origin(step, 0), "the checkpoint does not tell how far its job had read"
    if differing:
        details = ", ".join(f"{key}: {saved.get(key)!r} then, {current.get(key)!r} now" for key in differing)
        return Origin(step, 0), f"the checkpoint was made with other data ({details})"
    return Origin(step, consumed), None


def _map_tokens(data: TokenData) -> Tokens:
    dtype = np.dtype(data.dtype).newbyteorder("<")
    path = Path(data.path)
    try:
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes, which is no whole number of {data.dtype} tokens, or none: "
                "check data.dtype"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except OSError as error:
        raise DataError(f"data.path {data.path!r} cannot be read on this worker: {error}") from error


def _read_text(data: TextData) -> tuple[Tokens, int]:
    """All files' bytes in sorted order of path, and the number of files read."""
    files = sorted({file for path in data.paths for file in _files(path)})
    pieces: list[bytes] = []
    left = data.max_bytes
    for file in files:
        if left is not None and left <= 0:
            break
        try:
            with file.open("rb") as stream:
                piece = stream.read() if left is None else stream.read(left)
        except OSError as error:
            raise DataError(f"data file {str(file)!r} cannot be read on this worker: {error}") from error
        pieces.append(piece)
        left = None if left is None else left - len(piece)
    return np.frombuffer(b"".join(pieces), dtype=np.uint8), len(pieces)


def _files(path: str) -> Iterable[Path]:
    """The files one entry of data.paths stands for; at least one, else DataError."""
    if path == PYTHON:
        found = list(_python_files())
    elif Path(path).is_file():
        found = [Path(path)]
    elif Path(path).is_dir():
        found = [file for file in Path(path).rglob("*") if file.is_file()]
    else:
        found = [Path(match) for match in glob.glob(path, recursive=True) if Path(match).is_file()]  # noqa: PTH207 - absolute patterns
    if not found:
        raise DataError(
            f"data path {path!r} names no file on this worker: give a file, a folder with files, or a pattern"
        )
    return [file.absolute() for file in found]


def _python_files() -> Iterator[Path]:
    """Sources and documentation of the running Python; installed packages and caches are left out."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*"):
        inside = file.relative_to(root).parts
        skipped = {"site-packages", "dist-packages", "__pycache__"}.intersection(inside)
        if not skipped and file.suffix in _PYTHON_SUFFIXES and file.is_file():
            yield file


def _digest(tokens: Tokens) -> str:
    """SHA-256 of the bytes; of 1,024 evenly spread blocks where reading all would take seconds."""
    view = tokens.view(np.uint8)
    digest = hashlib.sha256()
    if view.nbytes <= _WHOLE_DIGEST_BYTES:
        digest.update(view.data)
    else:
        for start in np.linspace(0, view.nbytes - _DIGEST_BLOCK_BYTES, _DIGEST_BLOCKS, dtype=np.int64):
            digest.update(view[start : start + _DIGEST_BLOCK_BYTES].data)
    return digest.hexdigest()
