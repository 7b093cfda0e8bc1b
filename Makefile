# Everything runs in .venv, which `make setup` builds and every other target sets up by itself.
#
# PYTHON    the interpreter to build .venv with             make setup PYTHON=python3.12
# TORCH     another torch than the pinned one; remembered   make setup TORCH=torch==2.9.1
#           until `make clean`
# PIP_ARGS  more arguments for pip                          make setup PIP_ARGS="--find-links wheels"
# ARGS      more arguments for the command of a target      make test ARGS="-k digest"  make demo ARGS=--help
# BENCHES   some benches instead of all                      make bench BENCHES="votes wire"
# RESULTS   where benches write instead of docs/results      make bench ARGS=--quick RESULTS=build/quick
# JOBS      processes that the tests run in                 make test JOBS=4

PYTHON ?= python3
TORCH ?=
PIP_ARGS ?=
ARGS ?=
JOBS ?= 2
RESULTS ?= docs/results

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
PINNED := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
REMEMBERED := $(shell cat $(VENV)/torch 2>/dev/null)
CHOSEN := $(or $(TORCH),$(REMEMBERED),$(PINNED))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-docker fuzz lint format docs bench proto clean force

help: ## list the targets
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# What .venv was built for: another torch, or a tree that has been moved or copied, builds it anew.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CHOSEN) in $(CURDIR))
$(READY): force
endif

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Atoll needs Python 3.10 or newer, and '$(PYTHON)' is not that ($$($(PYTHON) --version 2>&1))." \
	    "Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@grep -qsxF "$(CURDIR)" $(READY) || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV); } || { \
	  rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu install the package python3-venv" >&2; exit 1; }
	@rm -f $(VENV)/torch; [ "$(CHOSEN)" = "$(PINNED)" ] || echo "$(CHOSEN)" >$(VENV)/torch
	@sed '/^torch==/d' constraints.txt >$(VENV)/constraints.txt
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
	  -c $(VENV)/constraints.txt "$(CHOSEN)" -e '.[dev,fast]'
	@printf '%s in\n%s\n' "$(CHOSEN)" "$(CURDIR)" >$(READY)

setup: $(READY) ## build .venv with Atoll, torch and the development tools

demo: setup ## three nodes train on real text through a coordinator on this machine
	@$(BIN)/atoll demo $(ARGS)

# Tests use the optional packages; a user's `make demo` does without their 400 MB.
$(VENV)/extras: $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off $(PIP_ARGS) \
	  -c $(VENV)/constraints.txt "$(CHOSEN)" -e '.[dashboard,dev,docs,fast,hf,island,swarm]'
	@touch $@

test: lint $(VENV)/extras ## check style and types, then run all tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-docker: setup ## build the image, bring the multi-site bed up, break it, take it down
	$(BIN)/python -m pytest -m docker tests/system/test_docker.py $(ARGS)

# atheris has no wheel for every Python; without it the inputs are damaged at random alone.
fuzz: setup ## a million damaged inputs for all that reads bytes of a peer, then some by coverage (atheris)
	OMP_NUM_THREADS=1 $(BIN)/python -m bench fuzz --findings build/findings --check $(ARGS)
	@$(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS) atheris || exit 0; \
	  OMP_NUM_THREADS=1 $(BIN)/python -m bench fuzz --guided --inputs 200000 --check

lint: setup ## check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## put the code into the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/extras ## write the references anew from the code, then build the site to build/site
	@set -e; for page in cli_table:cli event_table:events exit_codes:errors metric_table:metrics runfile_table:run-file; do \
	  $(BIN)/python -m deploy.$${page%:*} >$(VENV)/page; mv $(VENV)/page docs/$${page#*:}.md; done
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Hours. A bench that fails does not stop the others; at the end it is listed, with how long each has taken.
BENCHES = $$($(BIN)/python -m bench | cut -d ' ' -f 1)

bench: setup ## run every bench and write its figures and pictures to docs/results
	@mkdir -p $(RESULTS) build; : >build/benches
	@for name in $(BENCHES); do begun=$$(date +%s); code=0; \
	  $(BIN)/python -m bench $$name --json $(RESULTS)/$$name.json $(ARGS) || code=$$?; \
	  [ $$code -eq 0 ] && state=done || state="FAILED with exit code $$code"; \
	  printf '%-11s %6d s  %s\n' $$name $$(($$(date +%s) - begun)) "$$state" >>build/benches; \
	  [ $$code -ne 130 ] || break; done; \
	cat build/benches; ! grep -q FAILED build/benches

proto: setup ## generate protos/atoll_pb2.py and its types from protos/atoll.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=. protos/atoll.proto

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
