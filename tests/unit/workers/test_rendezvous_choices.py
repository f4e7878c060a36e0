"""Choices of the rendezvous that need no network, and whose fault a failure is."""

import pytest
import torch
import torch.distributed as dist

from workers.errors import DataError, DeviceError, RendezvousError
from workers.failures import describe
from workers.protocol import Fault
from workers.rendezvous import choose_device, interface_of
from zero_core.errors import NonFiniteError

INTERFACES = {
    "lo": frozenset({"127.0.0.1", "::1"}),
    "eth0": frozenset({"192.0.2.7", "fe80::1"}),
    "eth1": frozenset({"2001:db8::7"}),
}


@pytest.mark.parametrize(
    ("address", "interface"),
    [("127.0.0.1", "lo"), ("192.0.2.7", "eth0"), ("2001:db8:0:0::7", "eth1"), ("fe80::1", "eth0")],
)
def test_the_interface_is_the_one_that_carries_the_address(address: str, interface: str) -> None:
    assert interface_of(address, INTERFACES) == interface


def test_an_address_that_no_interface_carries_is_an_error_naming_both() -> None:
    with pytest.raises(RendezvousError, match=r"192\.0\.2\.8: it has eth0 192\.0\.2\.7/fe80::1"):
        interface_of("192.0.2.8", INTERFACES)


def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_change() -> None:
    assert choose_device(gpus=0) == torch.device("cpu")
    if torch.cuda.is_available():
        assert choose_device(gpus=1) == torch.device("cuda", 0)
    else:
        with pytest.raises(DeviceError, match=r"resources\.gpus is 1"):
            choose_device(gpus=1)


@pytest.mark.parametrize(
    ("error", "aborted", "fault"),
    [
        (ValueError("in the model"), False, Fault.USER),
        (RuntimeError("size mismatch"), True, Fault.USER),
        (NonFiniteError("nan"), False, Fault.USER),
        (DataError("too short"), False, Fault.USER),
        (RendezvousError("nobody came"), False, Fault.COLLECTIVE),
        (dist.DistBackendError("connection closed"), False, Fault.COLLECTIVE),
        (dist.DistBackendError("connection closed"), True, Fault.ABORTED),
    ],
)
def test_whose_fault_an_exception_is(error: Exception, aborted: bool, fault: Fault) -> None:
    try:
        raise error
    except Exception as raised:
        failure = describe(raised, aborted=aborted)
    assert failure.fault is fault
    assert failure.message == f"{type(error).__name__}: {error}"
    assert "Traceback" in failure.traceback


def test_an_error_out_of_torch_distributed_itself_is_the_groups() -> None:
    """gloo's errors are plain RuntimeErrors; what tells them apart is where they come from."""
    code = compile("raise RuntimeError('closed by peer')", "/x/torch/distributed/distributed_c10d.py", "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(code)
    assert describe(raised.value, aborted=False).fault is Fault.COLLECTIVE
