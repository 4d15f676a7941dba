# make run        train the default model if there is none, then serve it at http://127.0.0.1:8000
# make test       run lint and all tests except the slow ones, 4 min on two cores
# make test-avx2  run the numeric tests as on a CPU that only has AVX2, 1 min
# make test-slow  run the slow tests: a million steps, planted bugs, kills, a round of traces, real clients
#                 (in .venv-clients), real models (in ~/.cache/pagedgpt)
# make test-all   run make test, then make test-slow
# make clean      delete everything that can be rebuilt: environments, caches, the corpora that train.py makes
# make clean-models  list models (out/) and the README's record (run.jsonl), ask, then delete them
#
# PIP_OPTIONS is passed to pip. For example, it can select torch's CPU build, which is 200 MB instead of 3 GB. Its index
# is shown at pytorch.org/get-started under CPU:
#   make run PIP_OPTIONS="--extra-index-url <that index>"
# VENV is the environment's folder: make test VENV=.venv-3.13 PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
PIP_OPTIONS ?=
BIN := $(VENV)/bin
# Two processes: when one has no tests left, it takes some from the other. PYTHONDONTWRITEBYTECODE is unset, because
# otherwise a hundred test processes would each compile the same modules.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
NUMERIC := test_paged.py tests/ops tests/engine tests/training tests/test_checkpoint.py tests/test_families.py \
	tests/test_post.py tests/test_tutorial_api.py tests/test_walkthrough.py \
	$(addprefix --ignore=tests/, engine/test_link.py engine/test_matcher.py engine/test_simulator.py \
	training/test_clock.py training/test_crashes.py)
MODEL := out/stdlib
# set if an installation was interrupted, because pip may then mistake half-installed packages for complete ones
AGAIN = $(wildcard $(VENV)/installing $(VENV)/tests-installing)
# on a terminal, pip shows its progress (stderr is tested, because stdout is captured here)
PIP = $(BIN)/python -m pip install --disable-pip-version-check $$(test -t 2 || echo --quiet) \
	$(if $(AGAIN),--force-reinstall) $(PIP_OPTIONS) -c constraints.txt
CORPORA := $(foreach name,stdlib stdlib_gpt2 shakespeare_char shakespeare_char_gpt2, $(addprefix data/$(name)/, \
	train.bin val.bin meta.json tokenizer.json tokenizer_config.json))

# goals share one environment and its cores, so they are made one after another, even with MAKEFLAGS=-j
.NOTPARALLEL:
.PHONY: run test tests test-avx2 test-slow test-all lint same-python clean clean-models

run: same-python $(VENV)/ready $(MODEL)/loss.png
	$(BIN)/python serve.py --model $(MODEL)

test: lint
	$(PYTEST)

tests: test

test-avx2: $(VENV)/tests-ready
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(NUMERIC)

test-slow: $(VENV)/tests-ready
	$(PYTEST) -m slow

test-all: test test-slow

lint: same-python $(VENV)/tests-ready
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

# training writes loss.png last; if it is missing, training that was stopped is resumed
$(MODEL)/loss.png: | $(VENV)/ready
	$(BIN)/python train.py --out $(MODEL) $(if $(wildcard $(MODEL)/train_state.pt),--resume)
	@test -f $@ || { echo "training was stopped: make run resumes it"; exit 1; }

$(VENV)/ready: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagedGPT needs Python 3.11 or later: make run PYTHON=python3.11")'
	@echo "installing requirements.txt into $(VENV)$(if $(PIP_OPTIONS),,: 3 GB with torch for CUDA, takes a few minutes)" \
		"(if it makes no progress, pip cannot reach its index: press Ctrl-C, and name another one in PIP_OPTIONS)"
	@$(if $(PIP_OPTIONS),true,nvidia-smi -L > /dev/null 2>&1) || echo "no NVIDIA GPU was found: torch's CPU build \
	is enough, and is only 200 MB. To install it instead, press Ctrl-C, then run make run \
	PIP_OPTIONS='--extra-index-url URL' with the index that pytorch.org/get-started shows for CPU"
	@mkdir -p $(VENV) && touch $(VENV)/installing
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(if $(AGAIN),--clear) $(VENV)
	@touch $(VENV)/installing
	@$(PIP) -r requirements.txt || { echo "pip failed, see above: is the package index reachable, is the disk full? \
	make run continues from here"; exit 1; }
	@rm $(VENV)/installing
	@touch $@

# PYTHON is only used to create an environment; an existing environment keeps its own Python
same-python:
	@test -z "$(filter command,$(origin PYTHON))" -o ! -e $(VENV)/ready || \
		test "$$($(PYTHON) -V)" = "$$($(BIN)/python -V)" || { echo "$(VENV) has $$($(BIN)/python -V), PYTHON is \
	$$($(PYTHON) -V 2>&1): name another VENV, or make clean first"; exit 1; }

# The packages for tests may replace packages that make run uses, so make run is not ready in the meantime. Without a
# network, the dry run fails before anything is replaced.
$(VENV)/tests-ready: requirements-test.txt $(VENV)/ready
	@echo "installing requirements-test.txt into $(VENV)"
	@$(PIP) --dry-run -r requirements-test.txt > /dev/null
	@rm $(VENV)/ready && touch $(VENV)/tests-installing
	@$(PIP) -r requirements-test.txt
	@rm $(VENV)/tests-installing
	@touch $(VENV)/ready $@

clean:
	rm -rf $(VENV) .venv .venv-clients .venv-ordinary .pytest_cache .ruff_cache .hypothesis .schemathesis
	find . -path "./.*" -prune -o -name __pycache__ -prune -exec rm -rf {} +
	rm -f $(CORPORA) compare.png out/replay.png out/page.html
	@echo "kept: models and all else in out/ (make clean-models), corpora made from your own files in data/"

clean-models:
	@found=$$(du -sh out/* out/.[!.]* run.jsonl 2> /dev/null); \
	test "$$found" || { echo "no models here"; exit 0; }; \
	echo "$$found"; printf "delete these for good? [y/N] "; read answer || true; \
	if [ "$$answer" = y ]; then rm -rf out run.jsonl; else echo "kept"; fi
