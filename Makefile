# `make demo` and `make test` do all set-up on a fresh machine with Python 3.11 or 3.12.
# The environment lives outside the checkout, keyed by the pins; `make clean-env` removes it.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo $$p; break; }; done)
PINS := $(wildcard tests/environment/*.txt)
KEY := $(shell { cat $(PINS); $(PYTHON) --version; } 2>/dev/null | sha256sum | cut -c1-12)
CACHE ?= $(if $(XDG_CACHE_HOME),$(XDG_CACHE_HOME),$(HOME)/.cache)/vllm-specpatch
VENV ?= $(CACHE)/venv-$(KEY)
BIN := $(VENV)/bin

# Python started in this folder must not find patches/ and kernels/ as top-level packages.
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A machine that forbids bytecode pays 10 s of compiling for every fresh process.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint env clean-env

env: $(VENV)/.complete
	@$(BIN)/pip install -q --no-deps --no-build-isolation -e .

$(VENV)/.complete: $(PINS)
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or 3.12 found: install one, or run make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "making $(VENV) (about 2 minutes, 2 GB, once)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q -r tests/environment/cpu.txt -r tests/environment/tools.txt
	@$(BIN)/pip install -q --no-deps -r tests/environment/pinned.txt
	@touch $@

demo: env
	@$(BIN)/vllm-specpatch predict --gpu sm_86

test: env
	@$(BIN)/ruff check .
	@$(BIN)/pytest

lint: env
	$(BIN)/ruff check .

clean-env:
	rm -rf $(CACHE)/venv-*
