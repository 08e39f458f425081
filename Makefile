# `make demo` and `make test` need Python 3.11 or newer and nothing else: each installs into .venv first.
# Tests run as two jobs side by side, about as long as each other; `make -j1 checks` runs one after the other.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SOURCES := hybrid_jax pallas_kernels tests examples benchmarks
KERNEL_TESTS := tests/kernels tests/engine/test_kernel_paths.py tests/test_benchmarks.py \
	tests/test_gpu_7b_smoke.py tests/test_on_gpu.py
# A second Python for other versions of jax; none if there is only one. The newest tested jax runs what depends most on
# the compiler; a newer one is taken by hand, when it is green. Kernels and steps are compiled for an H200 with the jax
# that machines with one have; without a second Python, with the jax at hand.
OTHER ?= $(shell for p in python3.13 python3.12 python3.11 $(HOME)/.pyenv/versions/3.1[123]*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] == ($(VERSION)) or sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
VERSION = $(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=",")' 2>/dev/null)
OTHER_VENV := .venv-other
OTHER_JAX := 0.12.0.1
OTHER_TESTS := tests/kernels tests/layers tests/parity tests/engine/test_donation.py \
	tests/engine/test_fusion_names.py tests/engine/test_sampling.py tests/engine/test_sampling_groups.py \
	tests/engine/test_sampling_noise.py
AOT_JAX := 0.11.2
AOT_VENV := $(if $(OTHER),.venv-aot,$(VENV))
# Beside the environment: the plugin, once found, would greet every program on a machine without a GPU.
AOT := $(AOT_VENV)/aot

.PHONY: help demo test checks test-engine test-kernels test-aot test-triton test-other lint format clean

help:
	@echo "make demo    install into $(VENV) and let the bundled model continue some code"
	@echo "make test    install into $(VENV) and run lint, tests and the documentation's examples"
	@echo "make lint    ruff and mypy only;  make format  rewrites the sources with ruff"
	@echo "make test-aot  compile kernels and steps for an H200, without a GPU"
	@echo "make clean   remove $(VENV) and caches"

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed-test lint
	+@$(MAKE) --no-print-directory --jobs=2 --output-sync=target checks

checks: test-engine test-kernels

test-engine: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(addprefix --ignore=,$(KERNEL_TESTS) tests/aot tests/interpreted)

test-kernels: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(KERNEL_TESTS)
	+@$(MAKE) --no-print-directory test-aot test-triton test-other

test-aot: $(VENV)/.installed-test $(AOT_VENV)/.installed-aot
	HYBRID_JAX_AOT=required JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(AOT_VENV)/bin/python -m pytest tests/aot

# jax-triton needs Python 3.12: without a second Python these may all be skipped.
test-triton: $(VENV)/.installed-test $(AOT_VENV)/.installed-aot
	TRITON_INTERPRET=1 JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(AOT_VENV)/bin/python -m pytest tests/interpreted

test-other: $(if $(OTHER),$(OTHER_VENV)/.installed-test)
ifeq ($(OTHER),)
	@echo "make: no second Python found; the tests ran on one version of jax"
else
	$(OTHER_VENV)/bin/python -m pytest $(OTHER_TESTS)
endif

lint: $(VENV)/.installed-test
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

# The stamps make both targets install once, and again when the dependencies change.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(OTHER_VENV)/.installed-test: pyproject.toml
	test -d $(OTHER_VENV) || $(OTHER) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --upgrade --editable '.[test]' \
		'jax<=$(OTHER_JAX)'
	@touch $@

.venv-aot/bin/python:
	$(OTHER) -m venv .venv-aot
	.venv-aot/bin/python -m pip --disable-pip-version-check --quiet install --editable '.[test]' jax==$(AOT_JAX)

# Only what compiles: jax's plugin and its runtime, of the version of jax that is there, and Triton where jax-triton runs.
$(AOT_VENV)/.installed-aot: pyproject.toml | $(AOT_VENV)/bin/python
	version=$$($(AOT_VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(AOT_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --upgrade --target $(AOT) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version $(if $(OTHER),'jax-triton>=0.4' 'triton<3.9')
	@touch $@

clean:
	rm -rf $(VENV) $(OTHER_VENV) .venv-aot .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
