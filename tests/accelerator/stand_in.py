"""Builds the stand-in accelerator and registers it with torch, as the device "standin" with the backend "standin_ccl".

Only for processes that are started for it: torch has one accelerator per process. The compiled module is kept in the
user's cache, under a digest of its source and of torch's version, so it is built once.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

KIND = "standin"
BACKEND = "standin_ccl"
NAME = "shardwright_standin"
SOURCES = [Path(__file__).parent / name for name in ("device.cpp", "process_group.cpp", "stand_in.h")]


def missing() -> str | None:
    """Why the stand-in can't be built here; None if it can."""
    return None if shutil.which("c++") else "the stand-in accelerator is compiled, and there is no c++"


def library() -> Path:
    """Where the compiled module is, or will be."""
    digest = hashlib.sha256(torch.__version__.encode() + sys.version.encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "shardwright-tests"
    return cache / f"{NAME}-{digest.hexdigest()[:16]}.so"


def build() -> None:
    """Compile it, if it is not there yet."""
    if library().exists():
        return
    library().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library().parent) as folder:
        _compile([source for source in SOURCES if source.suffix == ".cpp"], Path(folder)).replace(library())


def _compile(sources: list[Path], folder: Path) -> Path:
    """Both files at once, then the library of them."""
    from torch.utils.cpp_extension import include_paths, library_paths

    headers = [flag for path in (*include_paths(), sysconfig.get_path("include")) for flag in ("-isystem", path)]
    compiler = ["c++", "-std=c++20", "-fPIC", "-O0", f"-DTORCH_EXTENSION_NAME={NAME}", *headers]
    objects = [folder / f"{source.stem}.o" for source in sources]
    running = [
        subprocess.Popen([*compiler, "-c", str(source), "-o", str(result)], stderr=subprocess.PIPE, text=True)
        for source, result in zip(sources, objects, strict=True)
    ]
    errors = [process.communicate()[1] for process in running]
    assert all(process.returncode == 0 for process in running), "\n".join(errors)
    linked = folder / f"{NAME}.so"
    folders = [f"-L{path}" for path in library_paths()]
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run(["c++", "-shared", *map(str, objects), *folders, *libraries, "-o", str(linked)], check=True)
    return linked


@functools.cache
def register() -> None:
    """Make the stand-in, which `build` has built, the accelerator of this process."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    compiled: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiled)
    torch.utils.rename_privateuse1_backend(KIND)
    compiled.register_device()
    torch._register_device_module(KIND, _module(compiled))
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=None)

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return compiled.StandInBackend(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend(BACKEND, create, devices=[KIND])


def prepare(rank: int) -> str:
    """A process of a pool becomes a rank on a stand-in; the backends that it joins with."""
    register()
    torch.accelerator.set_device_index(rank)
    return f"cpu:gloo,{KIND}:{BACKEND}"


def _module(compiled: Any) -> ModuleType:
    """What torch looks up in the module of a device, such as `torch.cuda`."""
    module = ModuleType(f"torch.{KIND}")

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device(KIND if device is None else device).index
        return compiled.generator_of(-1 if index is None else index)  # type: ignore[no-any-return]

    def seed_all(seed: int) -> None:
        for index in range(module.device_count()):
            compiled.generator_of(index).manual_seed(seed)

    members = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": torch._C._accelerator_hooks_device_count,  # type: ignore[attr-defined]
        "current_device": torch.accelerator.current_device_index,
        "set_device": torch.accelerator.set_device_index,
        "synchronize": torch.accelerator.synchronize,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": torch.accelerator.current_stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
        "manual_seed_all": seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_device_name": lambda device=None: "Stand-in",
    }
    vars(module).update(members)
    sys.modules[module.__name__] = module
    return module
