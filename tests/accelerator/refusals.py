"""What the simulated accelerator refuses: python refusals.py LIBRARY. Exit code 0 if it does."""

import os
import sys
import tempfile

import simgpu
import torch
import torch.nn.functional as F


def refused(operation, message: str) -> None:
    try:
        operation()
    except RuntimeError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused; expected: {message}")


def main(library: str) -> None:
    with tempfile.NamedTemporaryFile() as events:
        simgpu.enable(library, 2, events.name)
        check_devices()
        check_uninitialized_memory()
        check_copies()
        check_random_numbers()
        check_fork()


def check_devices() -> None:
    here = torch.ones(3, device="simgpu")
    refused(lambda: here + torch.ones(3), "on the same device")
    refused(lambda: torch.cat([here, torch.ones(3)]), "on the same device")
    refused(lambda: here + torch.ones(3, device="simgpu:1"), "on the same device")
    refused(lambda: torch.ones(1, device="simgpu:2"), "invalid device ordinal")
    image = torch.ones(1, 1, 5, 5, device="simgpu")
    refused(lambda: F.conv2d(image, torch.ones(1, 1, 3, 3)), "convolution")
    assert (here + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # CUDA takes a CPU scalar, too


def check_uninitialized_memory() -> None:
    assert torch.empty(1000, device="simgpu").isnan().all().item()
    assert torch.empty_strided((10, 10), (1, 10), device="simgpu").isnan().all().item()


def check_copies() -> None:
    """A non_blocking copy is complete after the next wait."""
    numbers = torch.arange(5.0, device="simgpu")
    copy = numbers.to("cpu", non_blocking=True)  # to pinned memory
    assert copy.is_pinned() and copy.isnan().all()
    torch.accelerator.synchronize()
    assert copy.tolist() == [0, 1, 2, 3, 4]

    source = torch.ones(5).pin_memory()
    on_device = source.to("simgpu", non_blocking=True)
    source.zero_()  # too early
    refused(torch.accelerator.synchronize, "changed before it was read")
    assert on_device.tolist() == [1, 1, 1, 1, 1]


def check_random_numbers() -> None:
    torch.simgpu.manual_seed(1)
    first = torch.rand(3, device="simgpu").tolist()
    torch.manual_seed(2)
    cpu_state = torch.get_rng_state()
    torch.simgpu.manual_seed(1)
    assert torch.rand(3, device="simgpu").tolist() == first
    assert torch.equal(torch.get_rng_state(), cpu_state)
    generator = torch.Generator()
    refused(lambda: torch.rand(3, device="simgpu", generator=generator), "generator")


def check_fork() -> None:
    tensor = torch.ones(3, device="simgpu")
    child = os.fork()
    if child == 0:
        os._exit(0 if is_refused_after_fork(tensor) else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, "not refused after fork()"


def is_refused_after_fork(tensor: torch.Tensor) -> bool:
    try:
        tensor + 1
    except RuntimeError as error:
        return "forked subprocess" in str(error)
    return False


if __name__ == "__main__":
    main(sys.argv[1])
