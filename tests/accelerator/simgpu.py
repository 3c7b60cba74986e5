"""A simulated accelerator, torch.simgpu: see simgpu.cpp, and tests/README.md for what it proves.

    library = build()                       # once: compiles simgpu.cpp, about half a minute
    enable(library, devices=2, events=FILE) # in each process, after `import torch`

From then on, torch.accelerator is "simgpu", and gloo and nccl take its tensors. FILE gets a line of
JSON for each event {"kind", "what", "bytes", "stack": Python functions, inner first} of a kind:

    wait            the host waits for the device: item(), a blocking copy, nonzero() ...
    pinned copy     a non-blocking copy from or to pinned memory
    pageable copy   a non-blocking copy from other memory, so small that CUDA does not wait
    collective      of this device
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "simgpu.cpp"


def why_not() -> str:
    """What is missing to compile it; "" if nothing is."""
    if torch.__version__ < "2.14":
        return "PyTorch 2.14 or newer"
    if not shutil.which("g++"):
        return "g++ (on Debian: apt-get install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python (on Debian: apt-get install python3-dev)"
    return ""


def build() -> Path:
    """The compiled library. Compiles only for a new source, PyTorch or Python."""
    key = f"{torch.__version__} {sys.version} {SOURCE.read_text()}"
    name = f"simgpu-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    library = HERE / "build" / name
    if library.exists():
        return library
    library.parent.mkdir(exist_ok=True)
    headers = Path(torch.__file__).parent / "include"
    libraries = Path(torch.__file__).parent / "lib"
    includes = [headers, headers / "torch/csrc/api/include", sysconfig.get_path("include")]
    temporary = library.with_suffix(f".{os.getpid()}.tmp")
    command = ["g++", "-O1", "-std=c++20", "-fPIC", "-shared", "-w", SOURCE, "-o", temporary]
    command += [f"-I{path}" for path in includes]
    command += ["-DTORCH_EXTENSION_NAME=simgpu_library", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"]
    subprocess.run(command, check=True)
    temporary.replace(library)  # another process may be building it, too
    return library


def enable(library: Path | str, devices: int, events: Path | str) -> None:
    """Make this process one that has so many accelerators."""
    spec = importlib.util.spec_from_file_location("simgpu_library", library)
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    file = open(events, "a", buffering=1)  # until the process ends

    def report(kind: str, what: str, size: int) -> None:
        event = {"kind": kind, "what": what, "bytes": size, "stack": stack()}
        print(json.dumps(event), file=file)

    native.start(devices, report)
    torch.utils.rename_privateuse1_backend("simgpu")
    torch._register_device_module("simgpu", device_module(native))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    register_collectives(native)


def stack() -> list[str]:
    """Like ["loss train_distributed.py:230", ...]; empty in the threads of backward()."""
    functions = []
    frame = sys._getframe(1).f_back
    while frame:
        code = frame.f_code
        functions.append(f"{code.co_name} {Path(code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    return functions


def device_module(native) -> types.ModuleType:
    """What PyTorch and the trainer use of torch.simgpu."""
    module = types.ModuleType("torch.simgpu")

    def manual_seed(seed: int) -> None:
        native.seed(native.current_device(), seed)

    def manual_seed_all(seed: int) -> None:
        for device in range(native.device_count()):
            native.seed(device, seed)

    module.is_available = lambda: native.device_count() > 0
    module.device_count = native.device_count
    module.current_device = native.current_device
    module.set_device = lambda device: native.set_device(torch.device(device).index)
    module.is_initialized = lambda: not native.is_forked()
    module._is_in_bad_fork = native.is_forked
    module._lazy_init = lambda: None
    module.manual_seed = manual_seed
    module.manual_seed_all = manual_seed_all
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def register_collectives(native) -> None:
    """gloo also takes tensors on simgpu; nccl takes only those."""
    gloo_class = torch._C._distributed_c10d.ProcessGroupGloo
    backend = dist.Backend

    def create_gloo(store, rank, size, timeout):
        gloo = gloo_class(store, rank, size, timeout=timeout)
        return native.Collectives(gloo, False, native.current_device())

    def create_nccl(store, rank, size, timeout):
        gloo = gloo_class(store, rank, size, timeout=timeout)
        return native.Collectives(gloo, True, native.current_device())

    for name in ("gloo", "nccl"):
        if hasattr(backend, "_ensure_backend_registered"):  # PyTorch >= 2.14 does it when needed
            backend._ensure_backend_registered(name)
        backend.backend_type_map[name] = dist.ProcessGroup.BackendType.CUSTOM
    backend._plugins["GLOO"] = backend._BackendPlugin(create_gloo, False)
    backend._plugins["NCCL"] = backend._BackendPlugin(create_nccl, False)
    backend.backend_capability["gloo"] = ["cpu", "simgpu"]
    backend.backend_capability["nccl"] = ["simgpu"]
    backend.default_device_backend_map["simgpu"] = "nccl"
