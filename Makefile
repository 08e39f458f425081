# `make demo` and `make test` need Python 3.11 or newer and nothing else: each installs into .venv first.
# Tests run as eight jobs, two at a time, and lint before them; `make -j1 checks` runs one after the other.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# What Python compiled is kept, whatever the environment says: tests start hundreds of processes, and each of them would
# compile jax again, for 2 seconds.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports; for pip to compile everything takes longer than the rest of an installation.
PIP = python -m pip --disable-pip-version-check --quiet install --no-compile
SOURCES := hybrid_jax pallas_kernels tests examples benchmarks docs
# Most of the time goes into compiling. So most tests have programs compiled quickly (tests/conftest.py); what is marked
# `as_users` compares last bits or reads what the compiler made, and is compiled as users have it. `make test-all` has
# all compiled so, and takes what tests/drawing.py leaves out.
QUICKLY := HYBRID_JAX_COMPILE=quickly
NUMERIC_TESTS := tests/exactness tests/kernels tests/layers tests/parity
# What users meet, and the tests beside the folders.
SURFACE_TESTS := $(addprefix tests/,api batch cli docs openai process text viz) $(wildcard tests/test_*.py)
ELSEWHERE := tests/aot tests/interpreted tests/mesh
# No model runs in these.
FAST_TESTS := tests/cache tests/config tests/constraints tests/models tests/process tests/tiers tests/weights tests/test_costs.py \
	tests/test_docstrings.py tests/test_drawing.py tests/test_geometry.py tests/test_layering.py tests/test_machine.py \
	tests/schedule/test_bucket.py tests/sizing/test_defaults.py $(wildcard tests/schedule/test_scheduler_*.py)
MORE_FAST_TESTS := tests/sim tests/typing
PYTEST = python -m pytest --durations=15
# Each job runs the tests near the change, then others until it is so many seconds old (tests/choice.py). TIME=all: all.
TIME ?=
PLAN := .cache/tests/plan.json
JOB = HYBRID_JAX_JOB=$(1) HYBRID_JAX_SECONDS=$(2)
# A second Python for other versions of jax. The newest tested jax runs what depends most on the compiler; a newer one is
# taken by hand, when it is green. Kernels and steps are compiled for an H200 with the jax that machines with one have.
# OTHER=none leaves out what needs a second Python.
VERSION = $(shell $(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=",")' 2>/dev/null)
OTHER ?= $(shell for p in python3.13 python3.12 python3.11 $(HOME)/.pyenv/versions/3.1[123]*/bin/python; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] == ($(VERSION)) or sys.version_info < (3, 11))' \
	2>/dev/null && echo $$p && break; done)
ifeq ($(OTHER),none)
override OTHER :=
NO_OTHER := yes
endif
OTHER_VENV := .venv-other
OTHER_JAX := 0.12.0.1
# Steps of all kinds of layers, of one row, and with a second model; of the engine beside transformers one family: no
# jax but the oldest can compile quickly.
OTHER_OF := -k "in_place and (other_kinds or one_row or carried or second) or of_one_row and (delta or exact or DA) \
	or logits_agree or continues and jamba or jit_with_a_call"
OTHER_TESTS := $(addprefix tests/engine/test_,donation.py fusion_names.py) tests/parity tests/kernels/test_jax_triton.py
AOT_JAX := 0.11.2
AOT_VENV := $(if $(OTHER),$(OTHER_VENV),$(VENV))
# A folder in front of the environment: with jax of that version, and the plugin, which would otherwise greet every
# program on a machine without a GPU.
AOT := $(AOT_VENV)/aot
# Named after the versions, so that another version is installed at once.
OTHER_STAMP := $(OTHER_VENV)/.installed-test-jax-$(OTHER_JAX)
AOT_STAMP := $(AOT_VENV)/.installed-aot-jax-$(AOT_JAX)
# The versions of all else that the tests need; users install without it.
CONSTRAINTS := .ci/constraints.txt

# transformers and torch, for answers that tests compare with. `make test` reads those that are committed.
PARITY_VENV := .venv-parity
ANSWERS := tests.parity.make_small_files tests.parity.make_field_goldens tests.parity.make_narrow_goldens \
	tests.text.chat_goldens
ANSWERED := $(addprefix tests/parity/test_,small_files.py fields.py narrow_files.py) tests/text/test_chat_forms.py
# Installed without what they ask for: GPTQModel works with an older torch too, and of AutoAWQ one file is read. The
# rest is what GPTQModel imports.
PARITY_ALONE := gptqmodel==7.7.0 autoawq==0.2.9 defuser device-smi logbar pillow pypcre threadpoolctl tokenicer torchao
# Lies in a folder of its own: the last one that reads columns out of order.
PARITY_OLDER := compressed-tensors==0.12.2

.PHONY: help constraints demo docs parity check check-fast check-more test test-all checks second-python test-numeric \
	test-engine test-surface test-as-users test-aot test-triton test-mesh test-other lint format clean

help:
	@echo "make demo    install into $(VENV) and let the bundled model continue some code"
	@echo "make check   lint, types, layering and the tests without a model: under three minutes, before each commit"
	@echo "make test    install into $(VENV), run lint and the tests near a change, then others for a while: before it goes in"
	@echo "make test-all  the same with all cases, everything compiled as users have it, and far more random traffic: hours"
	@echo "make lint    ruff and mypy only;  make format  rewrites the sources with ruff"
	@echo "make test-aot  compile kernels and steps for an H200, without a GPU"
	@echo "make parity  ask transformers and others again what they make of files, fields and chats, and compare"
	@echo "make docs    build the documentation site into site/; runs the notebooks that have changed"
	@echo "make constraints  takes the newest versions of what the tests need into .ci/constraints.txt"
	@echo "make clean   remove $(VENV) and caches"

docs: $(VENV)/.installed-test
	$(BIN)/python docs/command_line.py
	$(BIN)/python docs/notebooks.py
	$(BIN)/zensical build --strict

parity: $(PARITY_VENV)/.installed
	for part in $(ANSWERS); do $(PARITY_VENV)/bin/python -m $$part || exit 1; done
	$(PARITY_VENV)/bin/$(PYTEST) $(ANSWERED)
	@git diff --stat -- tests/parity tests/text

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

check: $(VENV)/.installed-test
	+@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-fast check-more

check-fast: $(VENV)/.installed-test
	$(BIN)/$(PYTEST) -q -m "not slow" $(FAST_TESTS)

check-more: $(VENV)/.installed-test lint
	$(BIN)/$(PYTEST) -q -m "not slow" $(MORE_FAST_TESTS)

test: $(VENV)/.installed-test second-python
	@$(BIN)/python -m tests.choice plan
	+@HYBRID_JAX_PLAN=$(CURDIR)/$(PLAN) HYBRID_JAX_TIME=$(TIME) \
		$(MAKE) --no-print-directory --jobs=2 --output-sync=target checks
	@$(BIN)/python -m tests.choice report $(if $(NO_OTHER),one_python)

test-all: $(VENV)/.installed-test second-python
	@$(BIN)/python -m tests.choice plan
	+@HYBRID_JAX_PLAN=$(CURDIR)/$(PLAN) HYBRID_JAX_TESTS=all $(MAKE) --no-print-directory QUICKLY= OTHER_OF= checks
	@$(BIN)/python -m tests.choice report all $(if $(NO_OTHER),one_python)

# Without a second Python three jobs are shorter, so that must be wanted.
second-python:
	@test -n "$(OTHER)$(NO_OTHER)" || { echo "make: some tests need a second Python, 3.11 or newer and not that of" \
		"$(PYTHON), and none was found: install one, say where it is by make $(MAKECMDGOALS) OTHER=/path/to/python3.12," \
		"or leave these tests out by make $(MAKECMDGOALS) OTHER=none" >&2; exit 2; }

# Lint, then the longest first.
checks: lint test-engine test-surface test-numeric test-aot test-as-users test-mesh test-other test-triton

test-numeric: $(VENV)/.installed-test
	$(call JOB,numeric,240) $(QUICKLY) $(BIN)/$(PYTEST) -m "not as_users" $(NUMERIC_TESTS)

test-engine: $(VENV)/.installed-test
	$(call JOB,engine,240) $(QUICKLY) $(BIN)/$(PYTEST) -m "not as_users" \
		$(addprefix --ignore=,$(NUMERIC_TESTS) $(SURFACE_TESTS) $(ELSEWHERE))

test-surface: $(VENV)/.installed-test
	$(call JOB,surface,240) $(QUICKLY) $(BIN)/$(PYTEST) -m "not as_users" $(SURFACE_TESTS)

test-as-users: $(VENV)/.installed-test
	$(call JOB,as_users,100) $(BIN)/$(PYTEST) -m as_users $(addprefix --ignore=,$(ELSEWHERE))

test-aot: $(VENV)/.installed-test $(AOT_STAMP)
	$(call JOB,aot,150) HYBRID_JAX_AOT=required JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(AOT_VENV)/bin/$(PYTEST) tests/aot

# jax-triton needs Python 3.12.
test-triton: $(VENV)/.installed-test $(AOT_STAMP)
	$(call JOB,triton,60) TRITON_INTERPRET=1 JAX_PLATFORMS=cpu PYTHONPATH=$(AOT) $(AOT_VENV)/bin/$(PYTEST) tests/interpreted

# jax makes eight devices of a CPU before it is first used.
test-mesh: $(VENV)/.installed-test
	$(call JOB,mesh,90) $(QUICKLY) $(BIN)/$(PYTEST) tests/mesh

test-other: $(if $(OTHER),$(OTHER_STAMP))
ifeq ($(OTHER),)
	@echo "make: without a second Python the tests ran on one version of jax"
else
	@found=$$($(OTHER_VENV)/bin/python -c 'import jax; print(jax.__version__)'); test "$$found" = "$(OTHER_JAX)" || { \
		echo "make: $(OTHER_VENV) must have jax $(OTHER_JAX), and it has $$found; set OTHER_JAX to a version that" \
		"$(OTHER) can install" >&2; exit 2; }
	$(call JOB,other,60) $(OTHER_VENV)/bin/$(PYTEST) $(OTHER_OF) $(OTHER_TESTS)
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
	$(BIN)/$(PIP) --editable '.[cpu]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/$(PIP) --constraint $(CONSTRAINTS) --editable '.[test]'
	@touch $@ $(VENV)/.installed

$(OTHER_STAMP): pyproject.toml $(CONSTRAINTS)
	test -d $(OTHER_VENV) || $(OTHER) -m venv $(OTHER_VENV)
	$(OTHER_VENV)/bin/$(PIP) --upgrade --constraint $(CONSTRAINTS) --editable '.[test]' 'jax<=$(OTHER_JAX)'
	@touch $@

# The newest versions of what the tests need, into the file that pins them.
constraints: $(VENV)/.installed-test $(if $(OTHER),$(OTHER_STAMP))
	for python in $(BIN)/python $(if $(OTHER),$(OTHER_VENV)/bin/python); do \
		$$python -m pip --disable-pip-version-check --quiet install --upgrade --upgrade-strategy eager \
			--editable '.[test]' 'jax<=$(OTHER_JAX)' || exit 1; done
	$(BIN)/python .ci/constraints.py $(BIN)/python $(if $(OTHER),$(OTHER_VENV)/bin/python)

$(PARITY_VENV)/.installed: pyproject.toml
	test -d $(PARITY_VENV) || $(PYTHON) -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/$(PIP) --editable '.[parity,test]'
	$(PARITY_VENV)/bin/$(PIP) --no-deps $(PARITY_ALONE)
	$(PARITY_VENV)/bin/$(PIP) --no-deps --upgrade --target $(PARITY_VENV)/older $(PARITY_OLDER)
	@touch $@

# Only what compiles: jax's plugin and its runtime, of the version of jax, and Triton where jax-triton runs.
$(AOT_STAMP): $(if $(OTHER),$(OTHER_STAMP),$(VENV)/.installed-test)
	version=$(if $(OTHER),$(AOT_JAX),$$($(BIN)/python -c 'import jax; print(jax.__version__)')) && \
	$(AOT_VENV)/bin/$(PIP) --no-deps --upgrade --target $(AOT) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version \
		$(if $(OTHER),jax==$$version jaxlib==$$version 'jax-triton>=0.4' 'triton<3.9')
	@touch $@

clean:
	rm -rf $(VENV) $(OTHER_VENV) $(PARITY_VENV) site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
