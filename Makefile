# Two commands matter: `make demo` and `make test`. Everything lands in .venv. Nothing else on the machine is touched, but
# for iproute2, with which tests make networks, chromium, in which they open the page, and sshd and Slurm, on which they
# launch runs: as root on Debian these are installed where they are missing, and none is started as a service. The
# Prometheus server of a test is taken out of Debian's package, into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUIET := --disable-pip-version-check --quiet --constraint constraints.txt
PIP := $(BIN)/pip install $(QUIET)
PEERS := $(VENV)/peers

.PHONY: help setup system demo test test-fast test-gpu test-peers test-kernels chaos fuzz lint format clean
help:
	@echo "make demo       install, then train a small language model on two processes of this machine"
	@echo "make test       install what the tests need and run them all"
	@echo "make test-fast  without the tests that take long"
	@echo "make test-gpu   strategies on a GPU's kernels, up to four ranks on one card; make test leaves them out"
	@echo "make test-peers what DeepSpeed, accelerate and torchtitan make of our files, in an environment of their own"
	@echo "make test-kernels a GPU's own kernels in Triton's interpreter, on a machine without one"
	@echo "make chaos      every fault that the tests know, the long ones too, and 200 kills at random moments"
	@echo "make fuzz       random models under random strategies against one process, until stopped"
	@echo "make lint       ruff (lint and format) and mypy"
	@echo "make format     let ruff rewrite the files"
	@echo "make setup      only install"

# torch goes first and pinned: left to a dependency, pip would take the newest build.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "meshwright needs Python 3.11 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(PIP) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.setup
	$(PIP) --editable '.[dev]'
	@touch $@

setup: $(VENV)/.setup

system:
	@{ command -v ip && command -v ss && command -v tc; } >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq iproute2; \
	else echo "iproute2 is missing: tests of several machines are skipped"; fi
	@[ -x $(BIN)/prometheus ] || command -v prometheus >/dev/null || \
	{ rm -rf $(VENV)/deb && mkdir -p $(VENV)/deb && cd $(VENV)/deb && { apt-get download -qq prometheus || \
	{ apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg-deb -x prometheus_*.deb . && \
	mv usr/bin/prometheus ../bin/ && cd .. && rm -r deb; } 2>/dev/null || \
	echo "prometheus is missing: its test is skipped"
	@{ [ -x /usr/sbin/sshd ] && command -v sbatch && [ -x /usr/sbin/slurmctld ] && [ -x /usr/sbin/slurmd ] && \
	[ -x /usr/sbin/munged ]; } >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then tools/install_without_services \
	openssh-server slurmctld slurmd slurm-client munge; \
	else echo "sshd or Slurm is missing: tests of launching on them are skipped"; fi
	@command -v chromium >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq chromium; \
	else echo "chromium is missing: tests of the page are skipped"; fi

demo: $(VENV)/.setup
	$(BIN)/meshwright train --preset demo --nproc 2 --fresh

test: $(VENV)/.dev system
	$(BIN)/pytest --workers 2

test-fast: $(VENV)/.dev
	$(BIN)/pytest --workers 2 -m "not slow and not slow_chaos"

test-gpu: $(VENV)/.dev
	$(BIN)/pytest tests/gpu

# Peers pin what they like: they have an environment of their own. Of torchtitan, which needs a GPU, its files are read.
$(PEERS)/.made: constraints.txt pyproject.toml
	mkdir -p $(VENV)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install $(QUIET) "$$(grep '^torch==' constraints.txt)"
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PEERS)/bin/pip install $(QUIET) deepspeed accelerate transformers
	$(PEERS)/bin/pip install $(QUIET) --no-deps torchtitan
	$(PEERS)/bin/pip install $(QUIET) --editable . pytest pytest-timeout
	@touch $@

test-peers: $(PEERS)/.made
	$(PEERS)/bin/python -m pytest tests/peers

# Triton takes a gigabyte and is of no use to the other tests: it has a folder of its own.
$(VENV)/triton/.made: constraints.txt $(VENV)/.dev
	rm -rf $(VENV)/triton
	$(PIP) --no-deps --target $(VENV)/triton triton
	@touch $@

test-kernels: $(VENV)/triton/.made
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 $(BIN)/pytest -W ignore tests/kernels

chaos: $(VENV)/.dev system
	$(BIN)/pytest tests/chaos -m "slow_chaos or not slow_chaos" -s
	$(BIN)/python -m tests.chaos.killer --kills 200

fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parity.fuzz

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) runs data build dist *.egg-info src/*.egg-info
