# make train   set up .venv and train a small model on this Python's own standard library
# make test    set up .venv with the test extras and run the CPU suite
# make lint    formatting, lint and types, nothing written
# make clean   remove .venv and the caches (runs/ stays)
#
# Variables: PYTHON (the interpreter that .venv is made from), TORCH_SPEC (what pip installs as torch; empty: whatever
# the package's own requirement resolves to), VENV_ARGS (--system-site-packages keeps a machine's own torch; then
# give TORCH_SPEC= too), TRAIN_ARGS, TEST_ARGS, TEST_WORKERS.

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
VENV_ARGS ?=
TRAIN_ARGS ?=
TEST_ARGS ?=
TEST_WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# The pip that comes with the interpreter is used as it is: it knows where this machine gets its packages from.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: train test lint clean

train: $(VENV)/.package
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/tiny_glm5/train.sh $(TRAIN_ARGS)

test: $(VENV)/.package-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(TEST_WORKERS) $(TEST_ARGS)

lint: $(VENV)/.package-test
	PYTHON=$(BIN)/python ./autoformatter.sh --check

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and alone, so that the choice of build (TORCH_SPEC) is settled before anything depends on it.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python %d.%d was found and 3.10 or newer is needed: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV_ARGS) $(VENV)
	@echo "Installing torch and the package into $(VENV) (once, a few minutes)"
	$(if $(strip $(TORCH_SPEC)),$(PIP) install $(TORCH_SPEC))
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.torch
	$(PIP) install -e .
	@touch $@

$(VENV)/.package-test: pyproject.toml $(VENV)/.torch
	$(PIP) install -e '.[test]'
	@touch $(VENV)/.package $@
