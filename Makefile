# `make demo` and `make test` work from a fresh clone: the first of them makes .venv and installs what
# constraints.txt pins. Another interpreter: `make test PYTHON=python3.12`.
#
# To use a torch you already have (a CUDA or ROCm build, say), leave make aside. From its environment either run the
# checkout as it is, `python3 -m mega_moe ladder`, or install it beside that torch with
# `pip install --no-deps -e .`. The command line also wants rich for its tables, safetensors for `--layer`, and
# matplotlib for `--plot`: `pip install rich safetensors matplotlib`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: demo test lint docs docs-build bench ranks clean

demo: $(STAMP)
	$(BIN)/mega-moe ladder

# Tests are mostly the interpreter's, which uses one core: two processes, with one torch thread each.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

# Keeps the theme from advertising its successor.
docs docs-build: export NO_MKDOCS_2_WARNING = 1

docs: $(STAMP)
	$(BIN)/mkdocs serve --no-strict

docs-build: $(STAMP)
	$(BIN)/mkdocs build

bench: $(STAMP)
	$(BIN)/mega-moe bench

# A process for each GPU of this host, and their record into docs/results.md. Fewer of them: `make ranks GPUS=2`.
GPUS ?= gpu

ranks: $(STAMP)
	$(BIN)/torchrun --standalone --nproc-per-node=$(GPUS) -m mega_moe.ranks_check --json build/ranks.json
	$(BIN)/python docs/render_results.py build/ranks.json

clean:
	rm -rf $(VENV) build site .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks

# pip learned dependency groups in 25.1; a fresh venv may bring an older one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[cli,bench,docs]' --group dev
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --group titan
	touch $@
