# SPDX-License-Identifier: Apache-2.0
# `make help` lists what there is. `make demo` and `make test` need no set-up before them: they do their own.
# PYTHON=/path/to/python3.12 chooses the interpreter; MEGATRON_LM=/path/to/Megatron-LM makes the demo and the end-to-end
# tests use a copy of that checkout. TESTS="tests/test_x.py -k name" narrows `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := $(CURDIR)/.venv
RUN := PATH="$(VENV)/bin:$$PATH" $(VENV)/bin/python
TESTS ?=

.PHONY: help setup demo test test-fast race-check software-gpu soak lint readme picture reproduce bench-adam bench-step clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## make .venv (Python 3.12, torch, megatron-core) and build cpp_adam; instant when nothing changed
	@scripts/setup.sh

demo: setup ## train a small GPT on real text with the stock optimizer and with ours, compare the losses
	@$(RUN) scripts/demo.py

test: setup ## run all tests
	@$(RUN) -m pytest $(TESTS)

test-fast: setup ## run the tests that are not slow, of every area, with two real trainings on 2 ranks
	@$(RUN) -m pytest -m "not slow" --durations 5 $(TESTS)

race-check: setup ## run the update in tens of thousands of random orders and without each of its dependencies
	@$(RUN) scripts/race_check.py

software-gpu: setup ## run the CUDA path on a GPU in software: engine, Megatron, and each of its faults planted
	@PYTHONPATH="$(CURDIR)/tests:$(CURDIR)/tests/e2e" $(RUN) scripts/software_gpu_check.py

soak: setup ## train for 2,000 steps with checkpoints, changing shares and skips; compare with a run undisturbed
	@$(RUN) tests/e2e/soak.py

lint: setup ## check the Python code with ruff, and the types of the package with mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m mypy

readme: setup ## write the tables of README.md and docs/ anew from the code
	@$(RUN) scripts/readme_tables.py

picture: setup ## draw the rooms of the package and their imports into docs/architecture.svg anew
	@$(RUN) scripts/architecture_picture.py

reproduce: setup ## compare the published measurements with the performance model, write the tables of docs/performance.md
	@$(RUN) scripts/reproduce.py
	@$(RUN) scripts/performance_page.py

bench-adam: setup ## measure the fused CPU AdamW against torch's
	@$(RUN) scripts/bench_adam.py

bench-step: setup ## measure the whole optimizer step and its memory against Megatron's own and its CPU offloading
	@$(RUN) scripts/bench_step.py

clean: ## remove build and demo outputs, keep .venv
	rm -rf build dist demo-output *.egg-info megatron_dos/_cpp_adam*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	rm -f $(VENV)/.stamp-package
	find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## remove .venv as well
	rm -rf .venv .cache
