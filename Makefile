# Every target that needs the virtual environment makes it first, from the hashed lock file.
# Needed on the machine: make and a python3 (3.11 or newer) with venv. Nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-from-lock
TOOLS := .cache/uv
VLLM := .cache/vllm
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench bench-core bench-routing bench-index bench-tokens tokens-check sim-check soak chaos panels-check lock reference e2e-vllm clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(STAMP) ## simulated replicas, gateway and traffic: round robin against Radixgate
	$(BIN)/radixgate demo $(DEMO_ARGS)

test: $(STAMP) ## the whole suite: unit, property, integration, end to end on llama.cpp
	$(BIN)/python -m pytest -m "not vllm" $(PYTEST_ARGS)

check: $(STAMP) ## format, lint, types, import contracts, then the whole suite
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not vllm" $(PYTEST_ARGS)

format: $(STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

e2e-vllm: $(STAMP) ## the end-to-end tests on two real vLLM replicas on the CPU (2 GB, some minutes)
	$(PYTHON) tests/engines/install_vllm.py --venv $(VLLM)
	E2E_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest -m vllm $(PYTEST_ARGS)

bench: $(STAMP) ## CPU time per request and per chunk beside nginx, haproxy and two Rust routers
	loadtest/bench/install_peers.sh
	$(BIN)/python -m loadtest.bench.run --json .cache/bench/bench.json $(BENCH_ARGS)

chaos: $(STAMP) ## ten minutes of kills, freezes, drains, reloads and restarts under SDK clients; nothing lost
	$(BIN)/python -m loadtest.chaos $(CHAOS_ARGS)

soak: $(STAMP) ## ten minutes of mixed faults: flat memory, every outcome explained
	$(BIN)/python -m loadtest.soak $(SOAK_ARGS)

bench-core: $(STAMP) ## what a prompt's chain, a decision and a page of metrics cost here, beside their budgets
	$(BIN)/python -m loadtest.bench_prompt
	$(BIN)/python -m loadtest.bench_conversation
	$(BIN)/python -m loadtest.bench_decide
	$(BIN)/python -m loadtest.bench_metrics

bench-routing: $(STAMP) ## every policy on every workload and load in the simulator, and what `cost` misses (hours)
	$(BIN)/python -m loadtest.bench_routing $(ROUTING_ARGS)

bench-index: $(STAMP) ## the prefix index at 1 and 10 million blocks: cost, memory, longest stall, beside their budgets
	$(BIN)/python -m loadtest.bench_index $(BENCH_ARGS)
	$(BIN)/python -m loadtest.bench_events

bench-tokens: $(STAMP) ## how fast each tokenizer library encodes here, and whether its ids are exact
	$(BIN)/python -m loadtest.bench_tokens $(TOKENS_ARGS)

tokens-check: $(STAMP) ## our token ids beside llama.cpp's, and vLLM's where `make e2e-vllm` installed it
	$(BIN)/python -m loadtest.tokens_check --start llamacpp \
		$(if $(wildcard $(VLLM)/ready),--start vllm --vllm-python $(CURDIR)/$(VLLM)/bin/python)

sim-check: $(STAMP) ## the simulator's engine beside a real vLLM on the CPU, the same requests to both (some minutes)
	$(BIN)/python -m loadtest.sim_check --vllm-python "$(if $(wildcard $(VLLM)/ready),$(CURDIR)/$(VLLM)/bin/python)" $(SIM_CHECK_ARGS)

panels-check: $(STAMP) ## every query of dashboards and alerts, asked of a real Prometheus under traffic
	$(BIN)/python -m loadtest.panels_check $(PANELS_ARGS)

lock: $(TOOLS)/bin/uv ## resolve pyproject.toml again into the hashed lock files
	$(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--custom-compile-command 'make lock' pyproject.toml -o requirements/core.lock
	$(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--custom-compile-command 'make lock' pyproject.toml --extra tokens --extra tokens-fast --extra zstd --extra events --extra otel --extra top --extra discovery -o requirements/full.lock
	$(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--custom-compile-command 'make lock' pyproject.toml --group dev --extra tokens --extra tokens-fast --extra zstd --extra events --extra otel --extra tune --extra top --extra discovery -o requirements/dev.lock
	$(TOOLS)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--custom-compile-command 'make lock' --allow-unsafe requirements/build.in -o requirements/build.lock

reference: $(STAMP) ## write what is generated: config/reference.yaml, docs/configuration.md, docs/metrics.md, dashboards
	$(BIN)/python -m gateway.config.reference --write
	$(BIN)/python -m gateway.telemetry.reference --write
	$(BIN)/python config/grafana/build.py

clean: ## remove what the other targets made
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info

$(STAMP): requirements/dev.lock pyproject.toml
	@$(PYTHON) -c 'import sys, venv; sys.exit(0 if sys.version_info >= (3, 11) else "needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "Preparing $(VENV) from requirements/dev.lock (about a minute, once)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

$(TOOLS)/bin/uv:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet uv
