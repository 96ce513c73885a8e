# `make demo` and `make test` work on a machine with Python 3.11+ and nothing else installed.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
N ?= 2000

.PHONY: env demo test check sweep mutants clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[recipes,dev]"
	$(BIN)/pip install --quiet --constraint constraints.txt triton==3.7.1 numpy packaging psutil
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
	touch $@

demo: env
	$(BIN)/longspan train recipes/digits_vl.py

test: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests

check: env
	PATH="$(abspath $(BIN)):$$PATH" bash scripts/check

sweep: env
	$(BIN)/python -m longspan.parity.sweep --n $(N)

mutants: env
	$(BIN)/python -m longspan.parity.mutants

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
