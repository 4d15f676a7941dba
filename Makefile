# make run        train the default model if there is none, then serve it at http://127.0.0.1:8000
# make test       lint and all tests but the large volumes, 2 min 34 s on two cores
# make test-all   the large volumes too: a million steps, planted bugs, many kills, real clients (in .venv-clients),
#                 real models (in ~/.cache/pagedgpt)
#
# PIP_OPTIONS goes to pip as it is, for example to choose the CPU-only wheels of torch:
#   make run PIP_OPTIONS="--extra-index-url <the index of the CPU wheels>"

PYTHON ?= python3
PIP_OPTIONS ?=
BIN := .venv/bin
# two processes, each of which takes over tests from the other when it has none left
# (and no PYTHONDONTWRITEBYTECODE: a hundred processes of the tests would compile the same modules)
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses 2 --dist worksteal
MODEL := out/stdlib

.PHONY: run test tests test-all lint clean

run: .venv/ready $(MODEL)/loss.png
	$(BIN)/python serve.py --model $(MODEL)

test: lint
	$(PYTEST)

tests: test

test-all: .venv/ready
	$(PYTEST) -m "slow or not slow"

lint: .venv/ready
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet

# loss.png is the last thing that a training writes: one that was stopped goes on where it was
$(MODEL)/loss.png: | .venv/ready
	$(BIN)/python train.py --out $(MODEL) $(if $(wildcard $(MODEL)/train_state.pt),--resume)
	@test -f $@ || { echo "the training was stopped: make run goes on from there"; exit 1; }

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagedGPT needs Python 3.11 or later: make run PYTHON=python3.11")'
	@echo "installing what requirements.txt lists into .venv: a minute or more, without a word"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_OPTIONS) -r requirements.txt
	@touch $@

clean:
	rm -rf .venv .venv-clients out data/*/*.bin data/*/*.json
