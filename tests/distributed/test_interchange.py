"""Export to and import from safetensors folders as others write and read them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import create_server
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.distributed.odd_model import OddModel, batch, build
from tests.distributed.ranks import run_ranks
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine, checkpoint
from zero_core.checkpoint.inspection import diff, verify
from zero_core.checkpoint.interchange import INDEX, export_model, import_model
from zero_core.errors import CheckpointError, DamagedError, UsageError
from zero_core.state_dict import full_state_dict

pytestmark = pytest.mark.distributed


class Assorted(OddModel):
    """With buffers of every sort: integers, booleans, 8-bit floats, 0-d, empty; an int64 of 2**60 + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(123.0))
        self.register_buffer("count", torch.tensor(2**60 + 1))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.arange(5, dtype=torch.float32).to(torch.float8_e4m3fn))
        self.register_buffer("brief", torch.tensor([0.1, float("nan")], dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.empty(0, 3, dtype=torch.int16))
        self.table = nn.Parameter(torch.tensor([3, 2**62, -1]), requires_grad=False)
        self.byte = nn.Parameter(torch.tensor(250, dtype=torch.uint8), requires_grad=False)


def assorted(seed: int) -> Assorted:
    torch.manual_seed(seed)
    return Assorted()


def make(stage: int, precision: str, model: nn.Module) -> ZeroEngine:
    config = ZeroConfig(
        stage=stage, precision=precision, tile=64, staging_bytes=4096, optimizer=AdamWConfig(lr=1e-2)
    )
    return ZeroEngine(model, config)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), flat.numpy().tobytes()


def exports(rank: int, world: int, root: Path) -> Any:
    found = {}
    for precision in ("fp32", "bf16"):
        engine = make(2, precision, assorted(3))
        engine.backward(engine(*batch(0, rank)))
        engine.step()
        folder = checkpoint.save(engine, root / precision, extra={}, generation=1).location
        state = full_state_dict(engine, dtype="master")
        found[precision] = folder, {name: bits(tensor) for name, tensor in state.items()}
    return found


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return {name: bits(tensor) for name, tensor in found.items()}


def imports(rank: int, world: int, cases: list[tuple[int, str, str]]) -> list[dict[str, Any]]:
    found = []
    for stage, precision, folder in cases:
        engine = make(stage, precision, assorted(8))
        import_model(engine, folder)
        assert (engine.steps_done, engine.optimizer.steps_done) == (0, 0)
        for state in engine.optimizer.states:
            assert not state.momentum.any()
            assert not state.variance.any()
        state = full_state_dict(engine, dtype="master")
        assert state["head.weight"] is state["embed.weight"]
        found.append({name: bits(tensor) for name, tensor in state.items()})
        engine.backward(engine(*batch(0, rank)))
        engine.step()
        with pytest.raises(UsageError, match="has done 1 steps"):
            import_model(engine, folder)
    return found


def test_an_export_is_bit_equal_and_comes_back(tmp_path: Path) -> None:
    """K2 (PyTorch 192485), K6 (transformers 48972): every dtype and shape; tied weights once."""
    saved = run_ranks(3, exports, tmp_path)[0]
    cases = []
    for precision, most in (("fp32", 5_000_000_000), ("bf16", 2_000)):
        folder, state = saved[precision]
        target = tmp_path / f"out-{precision}"
        files = [Path(file) for file in export_model(folder, target, max_shard_bytes=most)]
        assert sorted(files) == sorted(target.iterdir()), "and nothing else"
        got = read(target)
        assert "head.weight" not in got, "tied to embed.weight, stored once"
        for name, (dtype, shape, data) in state.items():
            if name == "head.weight":
                continue
            if name.startswith("blocks.1.") and precision == "bf16":  # frozen: held, and exported, in bf16
                want = bits(torch.frombuffer(bytearray(data), dtype=torch.float32).bfloat16())
                assert (got[name][0], got[name][2]) == (want[0], want[2]), name
            else:
                assert got[name] == (dtype, shape, data), name
        assert got.keys() == state.keys() - {"head.weight"}
        if precision == "fp32":
            assert [file.name for file in files] == ["model.safetensors"]
            with safe_open(files[0], framework="pt") as file:
                assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        else:
            assert len(files) > 4
            assert files[-1].name == INDEX
            index = json.loads(files[-1].read_text())
            assert index["weight_map"].keys() == got.keys()
            assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in got.values())
            assert index["metadata"]["head.weight"] == "embed.weight"
        cases.append((3 if precision == "fp32" else 1, precision, str(target)))
    # As model hubs keep them: files elsewhere, links in the folder.
    hub = tmp_path / "hub"
    hub.mkdir()
    for path in (tmp_path / "out-bf16").iterdir():
        (hub / path.name).symlink_to(path)
    cases.append((0, "bf16", str(hub)))
    tensors = load_file(tmp_path / "out-fp32" / "model.safetensors")
    tensors["head.weight"] = tensors.pop("embed.weight")  # under its other name
    (tmp_path / "renamed").mkdir()
    save_file(tensors, tmp_path / "renamed" / "model.safetensors")
    cases.append((2, "fp32", str(tmp_path / "renamed")))
    wanted = [saved[precision][1] for _, precision, _ in cases]
    for answer in run_ranks(2, imports, cases):
        assert answer == wanted


def test_an_export_in_one_dtype_rounds_parameters_only(tmp_path: Path) -> None:
    folder, state = run_ranks(2, exports, tmp_path)[0]["fp32"]
    for dtype, torch_dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        export_model(folder, tmp_path / dtype, dtype=dtype)
        got = read(tmp_path / dtype)
        for name in ("embed.weight", "blocks.0.gain", "blocks.1.up.bias", "empty"):
            _, shape, data = state[name]
            value = torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)
            assert got[name] == bits(value.to(torch_dtype).view(shape)), name
        for name in ("step", "count", "brief", "small", "table", "byte", "permutation"):
            assert got[name] == state[name]
    with pytest.raises(CheckpointError, match="holds a model already"):
        export_model(folder, tmp_path / "bf16")
    with pytest.raises(UsageError, match="dtype 'int8'"):
        export_model(folder, tmp_path / "x", dtype="int8")  # type: ignore[arg-type]
    shard = Path(folder) / "rank-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DamagedError, match="rank-00001"):
        export_model(folder, tmp_path / "damaged")
    assert not list((tmp_path / "damaged").iterdir()), "no half a model"


def refused(rank: int, world: int, folders: list[Path]) -> list[str]:
    messages = []
    for folder in folders:
        engine = make(2, "fp32", build())
        before = full_state_dict(engine, dtype="master")
        with pytest.raises(CheckpointError) as caught:
            import_model(engine, folder)
        messages.append(str(caught.value))
        after = full_state_dict(engine, dtype="master") if "tied" not in messages[-1] else before
        assert all(torch.equal(before[name], after[name]) for name in before)
    return messages


def test_what_cannot_be_imported_is_told_by_name(tmp_path: Path) -> None:
    """K11 (transformers 47176): no path out of the folder, nothing that executes; and tensors cut short."""
    whole = {name: tensor.contiguous() for name, tensor in build().state_dict().items()}
    del whole["head.weight"]

    def folder(name: str, tensors: dict[str, torch.Tensor] | None, **index: Any) -> Path:
        path = tmp_path / name
        path.mkdir()
        if tensors is not None:
            save_file(tensors, path / "model.safetensors")
        if index:
            (path / INDEX).write_text(json.dumps(index))
        return path

    named = {n: t for n, t in whole.items() if n != "norm.bias"} | {"final.bias": whole["norm.bias"]}
    cut = folder("cut", whole)
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    odd = folder("odd", None)
    text = json.dumps({"norm.bias": {"dtype": "F32", "shape": [13], "data_offsets": [-52, 0]}}).encode()
    (odd / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    save_file(whole, tmp_path / "outside.safetensors")
    messages = run_ranks(
        2,
        refused,
        [
            folder("names", named),
            folder("shapes", {**whole, "norm.bias": torch.zeros(14)}),
            folder("integers", {**whole, "permutation": torch.zeros(29)}),
            folder("tied", {**whole, "head.weight": whole["embed.weight"] + 1}),
            folder("empty", None),
            folder("up", None, weight_map=dict.fromkeys(whole, "../outside.safetensors")),
            folder("absolute", None, weight_map=dict.fromkeys(whole, str(tmp_path / "outside.safetensors"))),
            folder("lost", None, weight_map={"a": "model-1.safetensors"}),
            folder("listless", None, weight_map=[1]),
            cut,
            odd,
        ],
    )
    assert messages[0] == messages[1] or all("failed on rank" in m for m in messages[1])
    for message, part in zip(
        messages[0],
        [
            "missing norm.bias; unknown final.bias",
            "norm.bias: [14] of F32 in the file, [13] of F32 here",
            "permutation: [29] of F32 in the file, [29] of I64 here",
            "embed.weight is tied, but differs under its names",
            "neither model.safetensors nor",
            "'../outside.safetensors', which is no file of that folder",
            "which is no file of that folder",
            "'model-1.safetensors', which is no file of that folder",
            "is no index of a model",
            "is no whole safetensors file",
            "norm.bias of shape [13] in bytes -52 to 0",
        ],
        strict=True,
    ):
        assert part in message


# -- transformers ---------------------------------------------------------------------------------


def gpt2(seed: int) -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return GPT2LMHeadModel(config)


def tokens() -> torch.Tensor:
    return torch.arange(20).remainder(61).view(2, 10)


def trains_gpt2(rank: int, world: int, root: Path) -> Any:
    config = ZeroConfig(stage=3, tile=64, optimizer=AdamWConfig(lr=1e-2))
    engine = ZeroEngine(gpt2(1), config)
    engine.backward(engine(input_ids=tokens() + rank, labels=tokens() + rank).loss)
    engine.step()
    folder = checkpoint.save(engine, root, extra={}, generation=1).location
    with torch.no_grad():
        logits = engine.eval()(input_ids=tokens()).logits
    if rank == 0:
        engine.module.config.save_pretrained(root / "out")
    return folder, logits.numpy().tobytes()


def continues_gpt2(rank: int, world: int, folder: Path) -> bytes:
    engine = ZeroEngine(gpt2(2), ZeroConfig(stage=2, tile=64))
    import_model(engine, folder)
    with torch.no_grad():
        logits = engine.eval()(input_ids=tokens()).logits
    return bytes(logits.numpy().tobytes())


@pytest.mark.parametrize("most", [5_000_000_000, 20_000])
def test_transformers_loads_an_export_and_an_engine_what_transformers_saves(
    tmp_path: Path, most: int
) -> None:
    """K6: a tied head, stored once, is tied again; no network."""
    pytest.importorskip("transformers")
    folder, logits = run_ranks(2, trains_gpt2, tmp_path)[0]
    files = export_model(folder, tmp_path / "out", max_shard_bytes=most)
    assert (len(files) > 1) == (most < 5_000_000_000)
    from transformers import GPT2LMHeadModel

    model, info = GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        again = model.eval()(input_ids=tokens()).logits
    assert again.numpy().tobytes() == logits
    model.save_pretrained(tmp_path / "theirs")
    assert run_ranks(3, continues_gpt2, tmp_path / "theirs") == [logits] * 3


# -- a remote store -------------------------------------------------------------------------------


@pytest.fixture
def s3() -> Iterator[str]:
    """The address of a server that speaks S3, on this machine, with a bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                httpx.put(f"{url}/bucket", trust_env=False).raise_for_status()
                break
            except httpx.TransportError:
                assert server.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


def use(url: str) -> None:
    from fsspec.config import conf

    conf["s3"] = {"endpoint_url": url, "key": "key", "secret": "secret"}


def save_remote(rank: int, world: int, url: str, root: str) -> Any:
    use(url)
    engine = make(2, "bf16", build())
    for step in range(2):
        engine.backward(engine(*batch(step, rank)))
        engine.step()
        checkpoint.save(engine, root, extra={"step": step + 1}, generation=1)
    state = full_state_dict(engine, dtype="master")
    return {name: bits(tensor) for name, tensor in state.items()}


def load_remote(rank: int, world: int, url: str, root: str) -> Any:
    use(url)
    engine = make(3, "bf16", build(seed=7))
    loaded = checkpoint.load_newest(engine, root)
    state = full_state_dict(engine, dtype="master")
    return loaded, {name: bits(tensor) for name, tensor in state.items()}


def inspects_remote(rank: int, world: int, url: str, root: str) -> Any:
    """In a process of its own: the client's threads end with it."""
    use(url)
    import fsspec

    first, second = (f"{root}/step-0000000{step}.g0001" for step in (1, 2))
    assert verify(first) == verify(second) == []
    assert {d.what for d in diff(first, second)} == {"values differ"}
    files = export_model(second, f"{root}/export", max_shard_bytes=4_000)
    engine = make(1, "bf16", build(seed=7))
    import_model(engine, f"{root}/export")
    state = full_state_dict(engine, dtype="master")
    path = f"{second}/rank-00001.safetensors"
    system = fsspec.filesystem("s3")
    data = bytearray(system.cat_file(path))
    data[-1] ^= 1
    system.pipe_file(path, bytes(data))
    (damage,) = verify(second)
    assert damage.file == "rank-00001.safetensors"
    return files, {name: bits(tensor) for name, tensor in state.items()}


def test_a_store_that_speaks_s3(s3: str) -> None:
    root = "s3://bucket/jobs/a"
    want = run_ranks(3, save_remote, s3, root, timeout_s=120)[0]
    for loaded, state in run_ranks(2, load_remote, s3, root, timeout_s=120):
        assert (loaded.step, loaded.location, loaded.skipped) == (2, f"{root}/step-00000002.g0001", ())
        assert loaded.extra == {"step": 2}
        assert state == want
    ((files, state),) = run_ranks(1, inspects_remote, s3, root, timeout_s=120)
    assert len(files) > 3
    assert all(file.startswith(f"{root}/export/") for file in files)
    assert state == want
    for loaded, _ in run_ranks(2, load_remote, s3, root, timeout_s=120):
        assert loaded.step == 1
        assert loaded.skipped[0][0] == "step-00000002.g0001"
