# Commands of the repository. Targets create the environment .venv if they need it.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# output folders; targets overwrite them
RESULTS := results
FIGURES := figures/out
SITE := site
DEMO := demo
# the example of the README: a schedule of PyTorch, measured times, transfers as on NCCL
REAL := --table examples/schedule.csv --costs examples/measured.json --link rendezvous
# number of random examples of each fuzzer, and the fuzzers
EXAMPLES ?= 100000
FUZZ ?= tests/test_fuzz.py tests/test_fuzz_runs.py tests/test_one_meaning.py tests/test_certificates.py
# number of processes of the tests
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
# the tests start many processes, which share Python's bytecode
export PYTHONDONTWRITEBYTECODE :=
# packages with run-time checks of types and shapes; not the command line, which imports types lazily
TYPED := --jaxtyping-packages=pipejax.base,pipejax.schedules,pipejax.costs,pipejax.engine,pipejax.analysis,pipejax.search,pipejax.sweep,pipejax.training,pipejax.traces,pipejax.plots,pipejax.runtimes.exports,typecheck.check
# tests that also run as users compile, with run-time types
SAMPLE := $(addprefix tests/test_,public_api.py closed_forms.py links.py) \
	tests/test_batch.py::test_interpreted_equals_one_by_one tests/test_batch.py::test_unrolled_equals_interpreted

.DEFAULT_GOAL := help
.PHONY: help demo docs docs-serve formulas paper pipedream optpipe findings sweeps fidelity figures quick near test test-papers test-all lint types tests test-browser test-runtimes explorer-pictures fuzz sample bench dist schemas format lock clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv || { echo "python3 needs its venv module: apt install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(READY)  ## evaluate a real schedule with measured costs; picture and page in demo/
	mkdir -p $(DEMO)
	$(BIN)/pipejax evaluate $(REAL)
	$(BIN)/pipejax show $(REAL) --force --out $(DEMO)/timeline.png
	$(BIN)/pipejax show $(REAL) --force --out $(DEMO)/explorer.html
	@echo "look at $(DEMO)/timeline.png, and open $(DEMO)/explorer.html in a browser"

paper: $(READY)  ## repeat the tabular-schedule paper: fit, datasets, figures, Table I, claims (3 minutes)
	mkdir -p $(RESULTS)
	$(BIN)/python -m sweeps.tabular.schedules --out $(RESULTS)/tabular_schedules.zarr
	$(BIN)/python -m sweeps.tabular.schedule_tables --out $(RESULTS)/schedule_tables.zarr
	$(BIN)/python -m sweeps.tabular.regimes --out $(RESULTS)/regimes.zarr
	$(MAKE) figures
	$(BIN)/python -m sweeps.tabular.table --data $(RESULTS)/tabular_schedules.zarr
	$(BIN)/python -m sweeps.tabular.claims --data $(RESULTS)

pipedream: $(READY)  ## repeat the PipeDream theory: staleness, bound, experiments, figures, claims
	mkdir -p $(RESULTS)
	$(BIN)/python -m sweeps.pipedream.sweep --out $(RESULTS)
	$(MAKE) figures
	$(BIN)/python -m sweeps.pipedream.claims --data $(RESULTS)

optpipe: $(READY)  ## repeat OptPipe: dataset, figures, claims (ten minutes; longer searches: EFFORT=20)
	mkdir -p $(RESULTS)
	$(BIN)/python -m sweeps.optpipe.sweep --out $(RESULTS) $(addprefix --effort ,$(EFFORT))
	$(MAKE) figures
	$(BIN)/python -m sweeps.optpipe.claims --data $(RESULTS)

# findings with their own dataset; the finding on offloading reads the grid of `make optpipe`
FINDINGS := links regimes queues delays gradient_noise
GRID := $(RESULTS)/optpipe_grid.zarr

findings: $(READY)  ## make datasets, figures and claims of our findings (4 minutes after make optpipe)
	mkdir -p $(RESULTS)
	set -e; for name in $(FINDINGS); do \
		$(BIN)/python -m sweeps.findings.$$name --out $(RESULTS)/finding_$$name.zarr; done
	test -e $(GRID) || $(BIN)/python -m sweeps.optpipe.sweep --only grid --out $(RESULTS)
	$(BIN)/python -m sweeps.findings.offload --grid $(GRID) --out $(RESULTS)/finding_offload.zarr
	$(MAKE) figures
	$(BIN)/python -m sweeps.findings.claims --data $(RESULTS)

sweeps: $(READY)  ## make datasets of other figures: design space, sensitivity, jitter, timelines
	mkdir -p $(RESULTS)
	$(BIN)/pipejax sweep run sweeps/design/design_space.toml --out $(RESULTS)/design_space.zarr --resume
	$(BIN)/python -m sweeps.design.sensitivity --out $(RESULTS)/sensitivity.zarr
	$(BIN)/python -m sweeps.design.jitter --out $(RESULTS)/jitter.zarr
	$(BIN)/python -m sweeps.design.timelines --out $(RESULTS)/timelines.zarr

fidelity: $(READY)  ## predict all measured tables and write docs/accuracy.md; fails beyond a limit (ten minutes)
	mkdir -p $(RESULTS)
	$(BIN)/python -m sweeps.published.fidelity --out $(RESULTS)/fidelity.zarr --page docs/accuracy.md; code=$$?; \
	$(MAKE) figures && cp $(FIGURES)/accuracy.png docs/accuracy.png && exit $$code

figures: $(READY)  ## draw the figures of all existing datasets
	$(BIN)/python -m figures --data $(RESULTS) --out $(FIGURES)

docs: $(READY)  ## build the documentation in site/ and run its examples (a minute)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --site-dir $(SITE)
	$(BIN)/python -m pages.links $(SITE)

docs-serve: $(READY)  ## serve the documentation at http://127.0.0.1:8000 while you edit, without slow pages
	NO_MKDOCS_2_WARNING=1 DOCS_WHOLE=false $(BIN)/python -m mkdocs serve

quick: lint  ## lint and fast tests, without compilation, solver or process
	$(PYTEST) --quick tests

near: $(READY)  ## test the files that changed since main: tests/near.py says which tests
	tests=$$($(BIN)/python tests/near.py) && $(PYTEST) -m "not slow" $$tests

test: lint  ## run lint, types, tests, doctests
	$(MAKE) -j 2 types tests

test-all: lint types  ## run all tests, slow ones too, with run-time types and more examples
	$(PYTEST)
	$(PYTEST) tests/papers
	$(PYTEST) $(TYPED) tests
	XLA_FLAGS= HYPOTHESIS_PROFILE=nightly $(PYTEST) tests/test_recurrence.py tests/test_batch.py

test-papers: $(READY)  ## test the reproduced papers and their figures
	$(PYTEST) -m "not slow" tests/papers

lint: $(READY)  ## run ruff, format included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## run mypy, strict
	$(BIN)/mypy

tests: sample  ## run tests and doctests, after make sample
	$(PYTEST) -m "not slow" $(addprefix --deselect=,$(SAMPLE))

test-browser: $(READY)  ## test the explorer in a browser (apt install chromium; five minutes)
	$(PYTEST) -n 0 tests/browser

# PyTorch has a separate environment, because its wheel is large
RUNTIMES := .venv-runtimes
$(RUNTIMES)/ready: pyproject.toml
	$(PYTHON) -m venv $(RUNTIMES)
	$(RUNTIMES)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[torch]' pytest
	touch $@

test-runtimes: $(RUNTIMES)/ready  ## test tables in PyTorch's runtime (large download; twelve minutes)
	$(RUNTIMES)/bin/python -m pytest -q -c tests/runtimes/pytest.ini tests/runtimes

explorer-pictures: $(READY)  ## draw the explorer's pictures in docs/assets (apt install chromium)
	$(BIN)/python -m pages.explorer

fuzz: $(READY)  ## test EXAMPLES=100000 random files, tables, costs and certificates (one kind: FUZZ=tests/test_fuzz.py)
	HYPOTHESIS_PROFILE=nightly EXAMPLES=$(EXAMPLES) $(PYTEST) $(FUZZ)

sample: $(READY)  ## test the engine as users compile it, with run-time types
	XLA_FLAGS= $(PYTEST) -n 0 $(TYPED) $(SAMPLE)

formulas: $(READY)  ## compare closed forms with published ones and with the recurrence (five minutes)
	$(BIN)/python -m sweeps.published.forms
	$(BIN)/python -m benchmarks.formulas

bench: $(READY)  ## benchmark engine, sweep, tuning, training and search
	mkdir -p $(RESULTS)
	$(BIN)/python -m benchmarks.engine --out $(RESULTS)/benchmark_engine.json
	$(BIN)/python -m benchmarks.cold_start --out $(RESULTS)/benchmark_cold_start.json
	$(BIN)/python -m benchmarks.closed_form --out $(RESULTS)/benchmark_closed_form.json
	$(BIN)/python -m benchmarks.precision
	$(BIN)/python -m benchmarks.sweep --out $(RESULTS)/benchmark_sweep.json
	$(BIN)/python -m benchmarks.tuning --out $(RESULTS)/benchmark_tuning.json
	$(BIN)/python -m benchmarks.pipedream --out $(RESULTS)/benchmark_pipedream.json
	$(BIN)/python -m benchmarks.optimize --out $(RESULTS)/benchmark_optimize.json
	$(BIN)/python -m benchmarks.optimize_plain --out $(RESULTS)/benchmark_optimize_plain.json

dist: $(READY)  ## build wheel and source distribution in dist/
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	ls dist

schemas: $(READY)  ## write the schemas of --json from what the tests answer (seven minutes)
	rm -rf $(RESULTS)/answers && mkdir -p $(RESULTS)/answers
	PIPEJAX_ANSWERS=$(abspath $(RESULTS)/answers) $(PYTEST) -m "not slow" tests
	$(BIN)/python -m pages.schemas $(RESULTS)/answers

format: $(READY)  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:  ## rewrite requirements.lock (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--fork-strategy fewest --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet -o requirements.lock

clean:  ## remove generated files
	rm -rf .venv dist $(RUNTIMES) $(RESULTS) $(FIGURES) $(SITE) $(DEMO) .pytest_cache .mypy_cache .ruff_cache .hypothesis
