# Two commands for a new user: `make demo` and `make test`. Both create .venv on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-learning test-attack test-report lint docs bench pong clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[all,dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check rookery tests examples benchmarks docs
	$(BIN)/ruff format -q --check rookery tests benchmarks docs/site
	$(BIN)/mypy

test-learning: $(STAMP)
	$(BIN)/python -m pytest -m learning --timeout 7200 -s

# Random attacks from a printed seed, and repetitions of tests on more recipes and faults; ROOKERY_ATTACK_SEED repeats them, ROOKERY_ATTACK_MINUTES sets their length.
test-attack: $(STAMP)
	ROOKERY_ATTACK_ROUNDS=$${ROOKERY_ATTACK_ROUNDS:-1000} $(BIN)/python -m pytest tests/attack -m 'attack or not attack' --timeout 7200 -s
	$(BIN)/python -m pytest tests --ignore tests/attack -m attack

# The report page in a browser. Not a part of `test`: Chromium is 300 MB, and the page's structure is checked without it.
test-report: $(STAMP)
	command -v chromium >/dev/null || { apt-get update && apt-get install -y chromium; }
	$(BIN)/python -m pytest -m browser

# The pages as a site, in build/site: open index.html, no server and no network are needed.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(STAMP)
	$(BIN)/python benchmarks/throughput.py

# Pong until 18, part by part: about an hour and a half on two cores. The table and the curves are in docs/pong.md.
pong: $(STAMP)
	$(BIN)/python benchmarks/pong.py --seeds 1 2

clean:
	rm -rf $(VENV) build runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
