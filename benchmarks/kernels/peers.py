"""Public kernels through torch: finding them, sharing arrays with them, timing them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable
from time import perf_counter

import jax
import numpy as np

INSTALL = {  # package to import, and what to install
    "torch": "torch",
    "mamba_ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
    "flash_attn": "flash-attn",
    "flash_attn_interface": "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper",
    "flashinfer": "flashinfer-python",
    "causal_conv1d": "causal-conv1d",
}
TRITON_ONLY = ("mamba_ssm", "fla")  # what we call of these needs no compiled extension
VERSIONS = ("jaxlib", "numpy", "triton", *INSTALL.values())


class NotInstalled(Exception):
    """A peer's package is missing; says how to get it."""


def need(module: str):
    """Imports a peer's module, or raises NotInstalled with what to install."""
    package = module.split(".")[0]
    install = f"pip install {INSTALL[package]}"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name == package:
            raise NotInstalled(f"not installed: {install}") from error
        if package not in TRITON_ONLY or not _only_triton(package):
            raise NotInstalled(f"not usable: {error}; {install}") from error
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotInstalled(f"not usable: {error}; {install}") from error


def _only_triton(package: str) -> bool:
    """Puts an empty package in place of one that wants compiled extensions as soon as it is imported, so that its
    Triton files can be: they do not use them. False where it is not there at all."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return False
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
    stand_in = types.ModuleType(package)
    stand_in.__path__ = list(spec.submodule_search_locations)
    stand_in.__spec__ = (
        spec  # to be found again, by the next of its modules that cannot be imported
    )
    sys.modules[package] = stand_in
    return True


def versions() -> dict[str, str]:
    """Those of what is installed of JAX's and the peers' packages."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def to_torch(*arrays: jax.Array) -> tuple:
    """The arrays as tensors over the same memory; they must stay alive."""
    torch = need("torch")
    return tuple(torch.from_dlpack(array) for array in jax.block_until_ready(arrays))


def to_numpy(array) -> np.ndarray:
    """A jax array, numpy array or torch tensor on the host; floats as float32."""
    if hasattr(array, "detach"):
        array = array.detach().cpu()
        return (array.float() if array.is_floating_point() else array).numpy()
    array = np.asarray(array)
    return array if np.issubdtype(array.dtype, np.integer) else array.astype(np.float32)


class TorchClock:
    """Seconds per call of a peer, by rounds; runs once when made, and keeps what the first set gave."""

    def __init__(self, build: Callable, sets: list, repeats: int, per_round: Callable):
        self.torch = need("torch")
        calls = [build(*one) for one in sets]
        self.result = jax.tree.map(to_numpy, calls[0]())
        self.functions, self.calls = calls * repeats, len(calls) * repeats
        self.count, self.host_share, self.graph = 1, 0.0, None
        self.per_round, self.on_gpu = per_round, self.torch.cuda.is_available()

    def settle(self) -> None:
        """Warms up, makes a graph on a GPU, and chooses how many chains make a round."""
        self.eager()
        if self.on_gpu:
            self._capture()
        self()
        self.count = self.per_round(self() * self.calls)

    def eager(self) -> None:
        """All calls, one by one."""
        for function in self.functions:
            function()

    def _capture(self) -> None:
        """A graph of all calls; stays None where one of them cannot be captured."""
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):
            self.eager()
            self.eager()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        try:
            # Other threads are JAX's, which must not break the capture.
            with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.eager()
        except RuntimeError as error:
            print(f"  no CUDA graph: {str(error)[:120]}", file=sys.stderr)
            self.torch.cuda.synchronize()
        else:
            self.graph = graph

    def __call__(self, _=None) -> float:
        run = self.eager if self.graph is None else self.graph.replay
        if not self.on_gpu:
            start = perf_counter()
            for _ in range(self.count):
                run()
            return (perf_counter() - start) / (self.count * self.calls)
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.torch.cuda.synchronize()
        start = perf_counter()
        begin.record()
        for _ in range(self.count):
            run()
        end.record()
        queued = perf_counter() - start
        end.synchronize()
        self.host_share = queued / (perf_counter() - start)
        return begin.elapsed_time(end) / 1e3 / (self.count * self.calls)


def release() -> None:
    """Gives the memory that torch keeps for later back to the device."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
