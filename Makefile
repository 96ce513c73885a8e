# `make demo` and `make test` work on a machine with Python 3.11+ and nothing else installed.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
N ?= 2000
SHARDS ?= 1

.PHONY: env demo test check sweep mutants clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[recipes,dev]"
	$(BIN)/pip install --quiet --constraint constraints.txt triton==3.7.1 numpy packaging psutil
	$(BIN)/pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
	$(BIN)/pip install --quiet --no-deps --target $(VENV)/peers verl==0.9.1
	touch $@

demo: env
	$(BIN)/longspan train recipes/digits_vl.py

test: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests

check: env
	PATH="$(abspath $(BIN)):$$PATH" bash scripts/check

# N random examples in SHARDS processes (up to 4 ranks each), then the sum of their records
sweep: env
	rm -rf build/sweep && mkdir -p build/sweep
	for shard in $$(seq $(SHARDS)); do OMP_NUM_THREADS=1 $(BIN)/python -m longspan.parity.sweep --n $$(($(N) / $(SHARDS))) \
	  --seed $${shard}000 --json build/sweep/$$shard.json >build/sweep/$$shard.log 2>&1 & done; wait
	$(BIN)/python -m longspan.parity.sweep_summary build/sweep/[0-9]*.json --n $$(($(N) / $(SHARDS) * $(SHARDS))) --json build/sweep/sum.json

mutants: env
	$(BIN)/python -m longspan.parity.mutants

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
