# make run        train the default model if there is none, then serve it at http://127.0.0.1:8000
# make test       lint and all tests but the large volumes, 4 min on two cores
# make test-avx2  the numeric tests as on a CPU with AVX2 and no more, 1 min
# make test-slow  the large volumes: a million steps, planted bugs, many kills, a minute of traces, real clients
#                 (in .venv-clients), real models (in ~/.cache/pagedgpt)
# make test-all   make test, then make test-slow
#
# PIP_OPTIONS goes to pip as it is, for example to choose the CPU-only wheels of torch:
#   make run PIP_OPTIONS="--extra-index-url <the index of the CPU wheels>"
# VENV is the folder of the environment: make test VENV=.venv-3.13 PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
PIP_OPTIONS ?=
BIN := $(VENV)/bin
# two processes, each of which takes over tests from the other when it has none left
# (and no PYTHONDONTWRITEBYTECODE: a hundred processes of the tests would compile the same modules)
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
NUMERIC := test_paged.py tests/ops tests/engine tests/training tests/test_checkpoint.py tests/test_families.py \
	tests/test_post.py tests/test_tutorial_api.py tests/test_walkthrough.py
MODEL := out/stdlib

.PHONY: run test tests test-avx2 test-slow test-all lint clean

run: $(VENV)/ready $(MODEL)/loss.png
	$(BIN)/python serve.py --model $(MODEL)

test: lint
	$(PYTEST)

tests: test

test-avx2: $(VENV)/tests-ready
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(PYTEST) $(NUMERIC)

test-slow: $(VENV)/tests-ready
	$(PYTEST) -m slow

test-all: test test-slow

lint: $(VENV)/tests-ready
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

# loss.png is the last thing that a training writes: one that was stopped goes on where it was
$(MODEL)/loss.png: | $(VENV)/ready
	$(BIN)/python train.py --out $(MODEL) $(if $(wildcard $(MODEL)/train_state.pt),--resume)
	@test -f $@ || { echo "the training was stopped: make run goes on from there"; exit 1; }

$(VENV)/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagedGPT needs Python 3.11 or later: make run PYTHON=python3.11")'
	@echo "installing requirements.txt into $(VENV): a minute or more, without a word"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -r requirements.txt
	@touch $@

$(VENV)/tests-ready: requirements-test.txt $(VENV)/ready
	@echo "installing requirements-test.txt into $(VENV)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -r requirements-test.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv .venv-clients .venv-ordinary out data/*/*.bin data/*/*.json
