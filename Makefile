# make env        the environment .venv, with what runs need
# make pretrain   a small GPT-2 at tp 2 x pp 2 on the text of Python's library
# make layouts    the picture of the README: the same model in five layouts, and with a bug (20 minutes on two cores)
# make site       the documentation as a site, in site/
# make check      ruff, pyrefly, and half a minute of tests: for the loop of someone who edits
# make test       the environment, ruff, pyrefly, and the tests
# make test-all   the slow sweeps, too; SHARD=3/8 runs the third of eight shards
# make durations  make test, and record its seconds per folder in tests/support/durations.json

PYTHON ?= python3
VENV ?= .venv
# Processes that run tests side by side, each with ranks of its own.
WORKERS ?= 2
SHARD ?=
RUN := $(VENV)/bin/python
PLAIN := $(VENV)/.plain
INSTALLED := $(VENV)/.installed
PYTEST := $(RUN) -m pytest -n $(WORKERS) --dist worksteal
# Tests of single functions, and one small model at tp 2 x pp 2 against one process.
QUICK := tests/unit/parallel/test_schedule.py tests/unit/parallel/test_timing.py tests/unit/data/test_indexed.py \
    tests/unit/data/test_order.py tests/unit/models/test_initialize.py tests/unit/models/test_registry.py \
    tests/unit/optim/test_optim.py tests/unit/layers/test_masks.py tests/oracles/test_hugging_face_config.py \
    "tests/layouts/test_layouts.py::test_losses_and_gradient_norms_equal_one_process[tp2pp2-tied]"

env: $(PLAIN)

pretrain: $(PLAIN)
	$(RUN) pretrain_gpt.py --config configs/gpt2_tiny.toml
	$(RUN) tools/plot_metrics.py runs/gpt2-tiny/metrics.jsonl --output runs/gpt2-tiny/loss.png
	$(RUN) tools/generate.py runs/gpt2-tiny --prompt "    def __init__(self" --max-new-tokens 100 --temperature 0.8 \
	    --top-k 10 --seed 4

layouts: $(PLAIN)
	for layout in "one" "tp2 --tp 2" "pp2 --pp 2" "cp2 --cp 2" "dp2 --dp 2" \
	    "missing-all-reduce --tp 2 --sequence-parallel --import docs/missing_all_reduce.py"; do \
	    set -- $$layout; name=$$1; shift; rm -f runs/layouts/$$name.jsonl; \
	    $(RUN) pretrain_gpt.py $$@ --metrics runs/layouts/$$name.jsonl || exit 1; done
	$(RUN) tools/plot_metrics.py $(foreach name,one tp2 pp2 cp2 dp2 missing-all-reduce,runs/layouts/$(name).jsonl) \
	    --difference --output docs/layouts.png

site: $(INSTALLED)
	$(RUN) -m zensical build --strict -f mkdocs.yml

check: lint
	$(PYTEST) $(QUICK)

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) -m "slow or not slow" $(if $(SHARD),--shard $(SHARD))

durations: lint
	$(PYTEST) --record-durations tests/support/durations.json

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyrefly check --python-interpreter-path $(RUN) --output-format min-text --min-severity error

# What runs need; and what the tests need, in the same environment.
$(PLAIN): pyproject.toml constraints.txt
	@echo "creating $(VENV) and installing PyTorch and other packages: this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet setuptools wheel -c constraints.txt
	$(RUN) -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[plots]"
	touch $@

$(INSTALLED): $(PLAIN)
	$(RUN) -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

.PHONY: env pretrain layouts site check test test-all durations lint
