"""Products of our own at the start of an engine: what is found out, kept, and said; and XLA's products without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybrid_jax.config import XLA, EngineConfig
from hybrid_jax.engine.kernel_choice import with_own_products
from hybrid_jax.products.cpu import build, calls, ffi, start, trial
from hybrid_jax.products.cpu.build import Recipe, object_code, recipe
from hybrid_jax.products.cpu.source import target_name
from hybrid_jax.products.cpu.trial import Undecided, fault_of
from hybrid_jax.sizing.devices import Device, card
from tests.products.cpu_code import best, registered

NONE = "XLA's, for any number of rows: "


@pytest.fixture
def tried(monkeypatch):
    """Trials that take no process, and pass; the list has an entry for each."""
    best()
    found = []
    monkeypatch.setattr(start, "fault_of", lambda made, image: found.append(made.version))
    return found


def own(folder=None, asked=None):
    """As in a process that has not asked yet."""
    start._own_products.cache_clear()
    try:
        return start.own_products(folder, asked)
    finally:
        start._own_products.cache_clear()


def test_what_serves_is_said(tried):
    found = own()
    variant = recipe().variant
    assert found.about == f"our own for up to 32 rows, in {variant.about}; else XLA's"
    assert found.version == recipe().version


def test_a_variant_can_be_asked_for(tried):
    made = registered("avx2")
    found = own(asked="avx2")
    assert found.version == made.version and found.about.startswith(
        "our own for up to 32 rows, in AVX2"
    )
    assert own(asked="avx3") == start.Own("", f"{NONE}no avx3")


def test_code_and_verdict_are_kept(tried, tmp_path, monkeypatch):
    folder = tmp_path / "products"
    first = own(folder)
    assert tried == [first.version]
    monkeypatch.setattr(start, "object_code", lambda made: pytest.fail("compiled again"))
    assert own(folder) == first and tried == [first.version]
    # Another jaxlib is another trial.
    monkeypatch.setattr(start.jax.lib, "__version__", "0.99")
    assert own(folder) == first and len(tried) == 2


def test_a_damaged_file_is_made_again(tried, tmp_path):
    first = own(tmp_path)
    kept = tmp_path / f"{first.version}.o"
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert own(tmp_path) == first and kept.read_bytes() == whole


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no modes here")
def test_nothing_is_kept_where_others_may_write(tried, tmp_path):
    tmp_path.chmod(0o777)
    assert own(tmp_path).version and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_keeps_nothing(tried, tmp_path):
    (tmp_path / "file").write_text("")
    assert own(tmp_path / "file" / "products").version


# --- why XLA's products serve -------------------------------------------------------------------------


def test_without_llvmlite(monkeypatch):
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    said = f"{NONE}llvmlite is not installed: pip install 'hybrid_jax[cpu]'"
    assert own() == start.Own("", said)


def test_with_an_llvmlite_that_is_too_old(monkeypatch):
    llvmlite = pytest.importorskip("llvmlite")
    monkeypatch.setattr(llvmlite, "__version__", "0.44.0")
    said = f"{NONE}llvmlite 0.44.0 is older than 0.45: pip install 'hybrid_jax[cpu]'"
    assert own() == start.Own("", said)


def test_with_an_llvmlite_that_does_not_load(monkeypatch):
    def fail(name, *arguments):
        if name.startswith("llvmlite"):
            raise OSError("no such library")
        return imported(name, *arguments)

    imported = __import__
    monkeypatch.setattr("builtins.__import__", fail)
    assert own() == start.Own("", f"{NONE}llvmlite cannot be loaded: no such library")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((0, 9), "is 0.9, not one of 0.3, 0.4, 0.5"),
        (None, "is not known, not one of 0.3, 0.4, 0.5"),
    ],
)
def test_with_another_interface(monkeypatch, found, said):
    best()
    monkeypatch.setattr(ffi, "version", lambda: found)
    assert own() == start.Own("", f"{NONE}jaxlib's foreign function interface {said}")


def test_a_header_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(ffi.jax.ffi, "include_dir", lambda: str(tmp_path))
    assert ffi.version() is None


def test_on_another_processor(monkeypatch):
    best()
    monkeypatch.setattr(build, "fitting", lambda features: ())
    kinds = "AVX-512 with BF16, AVX-512, AVX2, NEON"
    assert own() == start.Own("", f"{NONE}the processor has none of {kinds}")


def test_on_another_system(monkeypatch):
    monkeypatch.setattr(start, "SYSTEMS", ())
    assert own().about.startswith(f"{NONE}not made for ")


def test_after_a_failed_trial(tried, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(start, "fault_of", lambda *_: "wrong products: rows_f32")
    said = start.Own("", f"{NONE}they failed a trial: wrong products: rows_f32")
    assert own(tmp_path) == said
    assert "failed a trial" in caplog.text
    monkeypatch.setattr(start, "fault_of", lambda *_: pytest.fail("tried again"))
    assert own(tmp_path) == said


def test_a_trial_that_said_nothing_is_made_again(tried, tmp_path, monkeypatch):
    def undecided(*_):
        raise Undecided("no process could try them: no memory")

    with monkeypatch.context() as patch:
        patch.setattr(start, "fault_of", undecided)
        assert own(tmp_path) == start.Own("", f"{NONE}no process could try them: no memory")
    assert own(tmp_path).version


def test_an_error_of_the_compiler_is_no_error_of_the_engine(tried, monkeypatch, caplog):
    def fail(made):
        raise RuntimeError("LLVM: expected instruction opcode")

    monkeypatch.setattr(start, "object_code", fail)
    assert own() == start.Own("", f"{NONE}LLVM: expected instruction opcode")
    assert "cannot be made" in caplog.text


# --- trials --------------------------------------------------------------------------------------------


def test_good_code_passes_its_trial():
    made = registered(best())
    assert fault_of(made, object_code(made)) is None


def with_text(change) -> Recipe:
    """The best variant's code with a change. A child would make it without that, so no process is asked."""
    made = recipe(best())
    text = change(made.text)
    assert text != made.text
    return Recipe(made.variant, text, made.compiler)


def test_wrong_code_fails_its_trial():
    # Sums of parts become differences.
    broken = with_text(lambda text: text.replace("fadd <16 x float>", "fsub <16 x float>"))
    build.register(broken, object_code(broken))
    said = trial.wrong_products(broken)
    assert said.startswith("wrong products: ") and "columns_f32 of f32 [1056, 1100]" in said


ENDED = [
    (SimpleNamespace(returncode=0, stdout=b"\n", stderr=b""), None),
    (SimpleNamespace(returncode=0, stdout=b"wrong products: x\n", stderr=b""), "wrong products: x"),
    (
        SimpleNamespace(returncode=-signal.SIGSEGV, stdout=b"", stderr=b""),
        "a trial ended with SIGSEGV",
    ),
]


@pytest.mark.parametrize(("done", "said"), ENDED)
def test_how_a_trial_ends_is_its_verdict(monkeypatch, done, said):
    made = registered(best())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert fault_of(made, b"") == said


def test_a_process_that_cannot_try_is_no_verdict(monkeypatch):
    made = registered(best())
    with pytest.raises(Undecided, match="ended with exit code 1: .*its version is "):
        fault_of(Recipe(made.variant, made.text + "\n", made.compiler), b"")
    monkeypatch.setattr(sys, "executable", "/usr/bin/app")
    with pytest.raises(Undecided, match="sys.executable is '/usr/bin/app', which is no Python"):
        fault_of(made, b"")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Undecided, match="no process could try them: .*nowhere"):
        fault_of(made, b"")


# --- what engines take --------------------------------------------------------------------------------


def test_only_engines_on_one_cpu_that_ask_for_nothing_else_have_them(tried, monkeypatch):
    found = start.Own("0123", "our own")
    monkeypatch.setattr("hybrid_jax.engine.kernel_choice.own_products", lambda folder: found)
    backend, said = with_own_products(XLA, EngineConfig(), Device())
    assert (backend.products, backend.version, said) == (calls.__name__, "0123", "our own")
    for engine, device in [(EngineConfig(kernels="xla"), Device()), (EngineConfig(), card("h200"))]:
        assert with_own_products(XLA, engine, device) == (XLA, "")
    divided = "XLA's, for any number of rows: the model is divided over several devices"
    assert with_own_products(XLA, EngineConfig(tp=2), Device()) == (XLA, divided)
    found = start.Own("", "XLA's: why")
    assert with_own_products(XLA, EngineConfig(), Device()) == (XLA, "XLA's: why")


def test_the_name_of_a_target_has_the_version():
    assert target_name("0123", "rows_f32") == "hybrid_jax_rows_f32_0123"
