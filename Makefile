# Everything a developer does here, one word each. `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
MINUTES ?= 10

BIN := $(VENV)/bin
RUN := $(BIN)/python
PIP := $(RUN) -m pip --disable-pip-version-check
# What builds the package itself stands in the runtime lock too, so that `make up` needs nothing that is not hashed.
COMPILE = printf 'hatchling\neditables\n' | $(RUN) -m uv pip compile --quiet --universal --python-version 3.11 \
	--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --no-annotate --upgrade

.DEFAULT_GOAL := help
.PHONY: help install up demo test test-slow test-container test-proxies test-time simulate graphs fuzz chaos check format bench audit sbom lock clean

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.dev ## Make .venv with everything development needs

up: $(VENV)/.runtime ## Run the whole of Tocsin on this machine (ARGS="--workers 2")
	@exec $(RUN) -m tocsin up $(ARGS)

demo: $(VENV)/.runtime ## Show jobs of each kind run for twenty seconds; leaves nothing behind (ARGS="--seconds 60")
	@exec $(RUN) -m tocsin demo $(ARGS)

test: $(VENV)/.dev ## Run the tests (ARGS="tests/store -k orphan")
	$(RUN) -m pytest -n 2 $(ARGS)

test-slow: $(VENV)/.dev ## Run the tests that take minutes
	$(RUN) -m pytest -m slow $(ARGS)

test-container: $(VENV)/.dev ## Run jobs in containers of a real podman; installs it (Debian, as root)
	@command -v podman >/dev/null && command -v crun >/dev/null && command -v busybox >/dev/null || \
		apt-get install --yes --no-install-recommends podman crun busybox-static
	$(RUN) -m pytest tests/worker/test_container.py tests/worker/conformance -k container $(ARGS)

test-proxies: $(VENV)/.dev ## Send requests that smuggle to the server behind haproxy and nginx; installs both (Debian, as root)
	@command -v haproxy >/dev/null && command -v nginx >/dev/null || \
		apt-get install --yes --no-install-recommends haproxy nginx-light
	$(RUN) -m pytest tests/node/test_http_proxies.py $(ARGS)

test-time: $(VENV)/.dev ## Hold schedules to a brute-force oracle at every move of every clock, 1970-2037 (half an hour)
	$(RUN) -m tests.time

fuzz: $(VENV)/.dev ## Let schemathesis attack the API, and Hypothesis the HTTP connection (MINUTES=10)
	FUZZ_MINUTES=$(MINUTES) $(RUN) -m pytest -s tests/surface/test_fuzz.py tests/node/test_http_fuzz.py

chaos: $(VENV)/.dev ## Ruin a fleet under load, check every promise, leave chaos-report.html (MINUTES=30 SEED=7)
	$(RUN) -m tests.cluster.round --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

simulate: $(VENV)/.dev ## Play seeded examples of the flow against a reference, on a clock moved by hand (MINUTES=10 ARGS="--seed 7")
	$(RUN) -m tests.simulation --minutes $(MINUTES) $(ARGS)

graphs: $(VENV)/.dev ## Play random workflows against a reference, with failures, cancels and lost workers (GRAPHS=1000)
	GRAPHS=$(or $(GRAPHS),1000) $(RUN) -m pytest -n 2 tests/flow/test_workflow_graphs.py

check: $(VENV)/.dev ## Lint, format check, types, floors of the house, house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(RUN) -m pytest tests/test_house.py

format: $(VENV)/.dev ## Format the code and sort its imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev ## Print the figures of this machine (ARGS="drain")
	$(RUN) -m bench $(ARGS)

audit: $(VENV)/.dev ## Check what we stand on: locks, licences, use, known holes (Error 3: nobody could be asked for those)
	@$(RUN) -m supply.audit

sbom: $(VENV)/.dev ## Write the bill of materials (CycloneDX) from the lock
	$(RUN) -m supply.sbom

lock: $(VENV)/.dev ## Resolve the dependencies anew into both lock files
	$(PIP) install --quiet uv
	$(COMPILE) --output-file requirements.lock pyproject.toml -
	$(COMPILE) --constraint requirements.lock --extra dev --output-file requirements-dev.lock pyproject.toml -
	@echo "Now: make install sbom audit"

clean: ## Remove .venv, caches and build output; data of `make up` stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist build
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Tocsin needs Python 3.11 or newer; this is '$$($(PYTHON) --version 2>&1)'. Name another: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; install its venv module (Debian: apt install python3-venv)." >&2; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: requirements.lock pyproject.toml | $(VENV)/.made
	@echo "Installing what Tocsin runs on …"
	@$(PIP) install --quiet --no-deps --require-hashes -r requirements.lock
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements-dev.lock $(VENV)/.runtime
	@echo "Installing what development needs …"
	@$(PIP) install --quiet --no-deps --require-hashes -r requirements-dev.lock
	@touch $@
