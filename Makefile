# make pretrain   the environment, and the main job: a small GPT-2 at tp 2 x pp 2 on the text of Python's library
# make test       the environment, ruff, and the tests
# make test-all   the slow sweeps, too

PYTHON ?= python3
VENV ?= .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

pretrain: $(INSTALLED)
	$(RUN) pretrain_gpt.py --config configs/gpt2_tiny.toml
	$(RUN) tools/plot_metrics.py runs/gpt2-tiny/metrics.jsonl --output runs/gpt2-tiny/loss.png

test: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest

test-all: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pytest -m "slow or not slow"

$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet setuptools wheel -c constraints.txt
	$(RUN) -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[test,plots]"
	touch $@

.PHONY: pretrain test test-all
