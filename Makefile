# Each target makes its own virtual environment first; all it needs is Python 3.11.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TORCH := torch==2.13.0
PROCESSES ?= 2
PLAN ?= zero3=2

# With more threads than cores per process, two processes on one machine slow each other down tenfold.
export OMP_NUM_THREADS := 1

.PHONY: demo test docs browser bench coverage ops mutants faults fuzz node-faults ray lint install clean

demo: $(READY)
	$(BIN)/torchrun --standalone --nproc-per-node=$(PROCESSES) examples/train_gpt.py --plan $(PLAN)

test: lint browser
	$(BIN)/python -m tests.side_by_side

# The documentation as a site, in site/; open site/index.html.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The tests of the report open it in Chromium, which comes from the system; without it they are skipped.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	} >/dev/null 2>&1 || echo "There is no chromium: the browser tests (tests/report/test_browser.py) are skipped."

bench: $(READY)
	$(BIN)/python -m bench.run

# Every architecture of transformers, about an hour on two cores.
coverage: $(READY)
	$(BIN)/python -m bench.coverage

# All of PyTorch's own samples of ops, modules and optimizers against eager, a few hours on two cores.
ops: $(READY)
	$(BIN)/python -m tests.ops --processes $(PROCESSES)

# The package with one thing changed at a time, which the tests must notice: an hour; see docs/testing.md.
mutants: $(READY)
	$(BIN)/python -m tests.mutants --report mutants.json $(MUTANTS)

# More than 100 faults of one line each, chosen by hand.
faults: $(READY)
	$(BIN)/python -m tests.faults

fuzz: $(READY)
	$(BIN)/python -m tests.fuzz

# Runs on several nodes that are disturbed, half a minute each; needs root.
node-faults: $(READY)
	$(BIN)/python -m tests.node_faults

# Two workers of Ray Train, one of them killed. Ray is not installed for the other tests.
ray: $(READY)
	$(BIN)/python -m pip install $(TORCH) -e '.[test,ray]'
	$(BIN)/python -m pytest tests/ray_train.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

install: $(READY)

# torch comes first and is named again, so that nothing installed after it can move it.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 is needed: make PYTHON=/path/to/python3.11"'
	$(BIN)/python -m pip install $(TORCH)
	$(BIN)/python -m pip install $(TORCH) -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
