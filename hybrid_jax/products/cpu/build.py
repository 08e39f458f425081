"""From text to machine code that XLA can call."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from hybrid_jax.products.cpu import ffi
from hybrid_jax.products.cpu.source import IMPORTS, SHARING, TARGETS, Sharing, source, target_name
from hybrid_jax.products.cpu.variants import VARIANTS, Variant, fitting

FIRST_LLVMLITE = (0, 45)  # the first one whose LLVM reads this text
HOW_TO_INSTALL = "pip install 'hybrid_jax[cpu]'"
DIGITS = 12  # of a digest that is part of a name


class Unavailable(Exception):
    """Why there are no products of our own, in words."""


@dataclass(frozen=True)
class Recipe:
    """All that a variant's machine code is made of.

    Attributes:
        variant: how vectors are made. text: of its functions. compiler: versions of what compiles it.
    """

    variant: Variant
    text: str
    compiler: str

    @functools.cached_property
    def version(self) -> str:
        """Part of the names of targets: a program calls the code that it was compiled for, or none."""
        made = (self.text, self.variant.cpu, self.variant.features, self.compiler)
        return hashlib.blake2b(repr(made).encode(), digest_size=DIGITS // 2).hexdigest()


def recipe(asked: str | None = None, sharing: Sharing = SHARING) -> Recipe:
    """What this processor's best variant is made of, or the one that is asked for by its name.

    Raises:
        Unavailable: something is missing.
    """
    llvm, version = compiler()
    known = ffi.version()
    if known not in ffi.KNOWN:
        said = "is not known" if known is None else f"is {known[0]}.{known[1]}"
        listed = ", ".join(f"{major}.{minor}" for major, minor in ffi.KNOWN)
        raise Unavailable(f"jaxlib's foreign function interface {said}, not one of {listed}")
    try:
        features = dict(llvm.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know how to ask this system
        features = {}
    found = fitting(features)
    if asked is not None:
        found = tuple(variant for variant in found if variant.name == asked)
    if not found:
        kinds = ", ".join(variant.about for variant in VARIANTS)
        raise Unavailable(f"the processor has none of {kinds}" if asked is None else f"no {asked}")
    return Recipe(found[0], source(found[0], known, sharing), version)


def compiler() -> tuple[Any, str]:
    """llvmlite's binding to LLVM, and the versions of both.

    Raises:
        Unavailable: it is not installed, too old, or cannot be loaded.
    """
    try:
        import llvmlite
        import llvmlite.binding as llvm
    except ModuleNotFoundError:
        raise Unavailable(f"llvmlite is not installed: {HOW_TO_INSTALL}") from None
    except Exception as error:  # its library does not load
        raise Unavailable(f"llvmlite cannot be loaded: {error}") from None
    found = tuple(int(part) for part in llvmlite.__version__.split(".")[:2] if part.isdigit())
    if found < FIRST_LLVMLITE:
        least = ".".join(map(str, FIRST_LLVMLITE))
        raise Unavailable(
            f"llvmlite {llvmlite.__version__} is older than {least}: {HOW_TO_INSTALL}"
        )
    return llvm, f"llvmlite {llvmlite.__version__} LLVM {llvm.llvm_version_info}"


def object_code(made: Recipe, triple: str | None = None) -> bytes:
    """Machine code as a file of the linker has it.

    Args:
        triple: what it is for, as LLVM says it; None for this machine.
    """
    llvm, _ = compiler()
    target = _machine(llvm, made.variant, triple)
    module = llvm.parse_assembly(made.text)
    module.verify()
    return target.emit_object(module)


def load(made: Recipe, image: bytes) -> dict[str, int]:
    """The addresses of the functions, by the names of products. The code stays for as long as the process lives."""
    llvm, _ = compiler()
    target = _machine(llvm, made.variant, None)
    library = llvm.JITLibraryBuilder().add_object_img(image)
    libc = ctypes.CDLL(None)
    for name in IMPORTS:  # a name that is missing here is an error of `link`, not an address 0
        address = ctypes.cast(getattr(libc, name), ctypes.c_void_p).value
        library.import_symbol(name, address)
    for each in TARGETS:
        library.export_symbol(each.name)
    linker = llvm.create_lljit_compiler(target)
    tracker = library.link(linker, f"hybrid_jax_products_{made.version}")
    addresses = {each.name: tracker[each.name] for each in TARGETS}
    # XLA's threads may run a late task when the interpreter is gone, so nothing may unmap this code.
    for kept in (linker, tracker):
        kept.detach()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    return addresses


@functools.cache
def register(made: Recipe, image: bytes) -> None:
    """Makes the products known to XLA: before a program that calls them is compiled or loaded."""
    for name, address in load(made, image).items():
        capsule = jax.ffi.pycapsule(ctypes.c_void_p(address))
        jax.ffi.register_ffi_target(target_name(made.version, name), capsule, platform="cpu")


def _machine(llvm: Any, variant: Variant, triple: str | None) -> Any:
    if triple is None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(triple)
    make: Callable[..., Any] = target.create_target_machine
    return make(
        cpu=variant.cpu,
        features=variant.features,
        opt=3,
        reloc="pic",
        codemodel="jitdefault" if triple is None else "default",
        jit=triple is None,
    )
