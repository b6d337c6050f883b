# `make train` and `make test` do everything on a machine with Python 3.11+ and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= configs/ppo_cartpole.toml
SOAK_SECONDS ?= 600

.PHONY: install train test test-all browser check format lint types chaos soak smax clean

install: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tianji needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,atari,box2d,minatar,mpe,mujoco,video]'
	@touch $(READY)

train: $(READY)
	$(BIN)/tianji train $(CONFIG)

test: $(READY)
	$(BIN)/python -m pytest -m 'not slow'

test-all: $(READY)
	HYPOTHESIS_PROFILE=all $(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint types test

# Pages are tested in Debian's Chromium. Where it is missing those tests are skipped, and say so.
browser:
	@command -v chromium >/dev/null || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium >/dev/null; }

chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py
	$(BIN)/python docs/tables.py

soak: $(READY)
	$(BIN)/python benchmarks/soak.py --seconds $(SOAK_SECONDS)

# JaxMARL wants an older gymnasium than the rest, so SMAX has an environment of its own.
SMAX   := .venv-smax
smax: $(SMAX)/.ready
	$(SMAX)/bin/python -m pytest tests/test_envs_smac.py

$(SMAX)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SMAX)
	$(SMAX)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(SMAX)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,smax]'
	@touch $@

clean:
	rm -rf $(VENV) $(SMAX)
