# Every command of this project. Set-up is automatic, in .venv. Each step has a
# stamp file: a second run repeats only the steps whose inputs have changed.
#
# Stamps differ by how often they change: the compiler's tools, torch and the
# test tools (rarely), and the compiled package (with every .pyx). Compilation
# needs only the first, so it runs during the installation of the others.

# Two jobs. make waits for them by select() on a pipe, which must have a descriptor below 1024: if so many are open that
# it would get a larger one, the makes of `setup` and `check` get the numbers 3 and 4, and their own two jobs.
SUBMAKE := $(MAKE) --no-print-directory
ifeq ($(MAKELEVEL),0)
ifeq ($(shell ls /proc/self/fd | awk '$$1 > 1000'),)
MAKEFLAGS += --jobs=2
else
SUBMAKE := exec 3<&- 4<&-; $(SUBMAKE) --jobs=2
endif
endif

# Tests start thousands of interpreters; without bytecode on disk each would compile its modules again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With two --quiet, pip prints errors, but no remarks about mirrors. PIP_NO_COMPILE: Python compiles a module at its
# first import, and few modules of torch are ever imported.
PIP := PIP_NO_COMPILE=1 $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
TORCH := torch==2.13.0

NATIVE := $(shell find pccl -name '*.pyx' -o -name '*.pxd' -o -name '*.h')
STUBBED := $(subst /,.,$(basename $(shell find pccl -name '*.pyi')))
LINTED := $(wildcard pccl cli stress tests benchmarks docs examples setup.py)

# Tests that run at the same time: more than there are cores, because most tests wait for something.
PARALLEL ?= -n $(shell echo $$(($$(nproc) + 2)))
PYTEST := $(BIN)/python -m pytest -q

.PHONY: help setup build test test-anywhere test-arm64 check lint debug sanitize coverage unit sim process demo stress bench clean

help:
	@echo "make test    set up, lint, type-check and run all tests"
	@echo "make demo    set up without torch and watch peers train while they come and go"
	@echo "make stress  an hour: fuzzing, simulation, all rings, killed reduces and syncs, fault points, ten minutes of churn"
	@echo "make bench   half an hour: all-reduce next to Gloo, pools, latencies, states, quantization, growth, rings, recovery"
	@echo "make lint    ruff, cython-lint, mypy and stubtest only; make unit, make sim, make process: one tier of the tests"
	@echo "make test-anywhere  two hours: all tests as another user, without IPv6, twice at once, ... (tests/conditions.sh)"
	@echo "make debug   build a copy with assertions in compiled code and run the tests of that code on it"
	@echo "make sanitize  the same with AddressSanitizer and UBSan"
	@echo "make coverage  the lines of Python and Cython that tests execute, per folder"
	@echo "make test-arm64  the tests that need no torch, compiled for aarch64 and emulated (tests/arm64)"
	@echo "make setup   tools, torch and the package in $(VENV)"
	@echo "make clean   remove what was built"

# --- Set-up -----------------------------------------------------------------

$(VENV)/.made:
	@echo "set-up: creating $(VENV)"
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) cannot create virtual environments; run: apt-get install python3-venv python3-dev gcc" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.compiler: | $(VENV)/.made
	@$(PIP) install --group build
	@touch $@

# Installed by plain pip, before any package that could install another torch.
$(VENV)/.torch: | $(VENV)/.compiler
	@echo "set-up: installing $(TORCH) (large; only once)"
	@$(PIP) install $(TORCH)
	@touch $@

# If torch is needed, it is installed first.
$(VENV)/.tools: pyproject.toml | $(VENV)/.compiler $(if $(WITH_TORCH),$(VENV)/.torch)
	@echo "set-up: installing build and test tools"
	@$(PIP) install --group dev
	@touch $@

$(VENV)/.compiled: $(VENV)/.compiler setup.py $(NATIVE)
	@echo "set-up: compiling pccl"
	@$(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Everything is compiled already; this step only tells Python where the package is.
$(VENV)/.built: $(VENV)/.tools $(VENV)/.compiled
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

# Only some targets need torch, so `setup` starts a make of its own with WITH_TORCH.
setup:
	@+$(SUBMAKE) WITH_TORCH=1 build

build: $(if $(WITH_TORCH),$(VENV)/.torch) $(VENV)/.built

# --- Checks -----------------------------------------------------------------

test: setup
	@+$(SUBMAKE) check

# Two halves, each of which keeps two cores busy. First the steps that compute: the unit tests, the linters and the
# simulation at the same time; each prints its output when it ends. Then the tests that wait: the process tests, more of
# them at the same time than there are cores.
check: build
	@+$(SUBMAKE) --output-sync=target --keep-going unit lint sim
	@+$(SUBMAKE) process

unit: build
	@echo "pytest tests/unit"
	@$(PYTEST) tests/unit

sim: build
	@echo "pytest tests/sim"
	@$(PYTEST) tests/sim

process: build
	@echo "pytest tests/process"
	@$(PYTEST) $(PARALLEL) tests/process

test-anywhere: setup
	@tests/conditions.sh

# TESTS: folders or files, instead of all tiers.
test-arm64: build
	@$(BIN)/python -m tests.arm64 $(TESTS)

lint: build
	@echo "ruff"
	@$(BIN)/ruff check --quiet $(LINTED)
	@$(BIN)/ruff format --quiet --check $(LINTED)
	@echo "cython-lint"
	@PATH="$(CURDIR)/$(BIN):$$PATH" cython-lint pccl  # which starts pycodestyle by its name
	@echo "mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "stubtest"
	@mkdir -p build
	@$(BIN)/python -m mypy.stubtest --concise --ignore-missing-stub --ignore-disjoint-bases --ignore-unused-allowlist \
	  --mypy-config-file pyproject.toml --allowlist tests/stubtest_allowlist.txt $(STUBBED) > build/stubtest.log \
	  || { cat build/stubtest.log; exit 1; }

# Copies of the tree under build/, each compiled with its own flags, so that the usual build stays as it is. Objects of
# Python are allocated by malloc there, so that the sanitizer sees their bounds too. `make sanitize` needs gcc, whose
# libasan is preloaded. --capture=sys captures output of Python code only: the last lines of a process that aborts must
# reach the terminal.
COMPILED_TESTS := tests/unit/_core tests/unit/memory tests/unit/actors tests/unit/client
SANITIZED := LD_PRELOAD="$$(gcc -print-file-name=libasan.so)" PYTHONMALLOC=malloc \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1

BUILT_FOR_debug := PCCL_DEBUG=1
BUILT_FOR_sanitize := PCCL_DEBUG=1 PCCL_SANITIZE=1
BUILT_FOR_coverage := PCCL_COVERAGE=1

build/debug build/sanitize build/coverage: build/%: setup
	@mkdir -p $@
	@echo "set-up: building $@"
	@find $@ -type f ! -path '$@/build/*' ! -name '*.so' ! -name '*.c' -delete  # removes files that the tree no longer has
	@git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xf - -C $@
	@cd $@ && $(BUILT_FOR_$*) $(CURDIR)/$(BIN)/python setup.py --quiet build_ext --inplace
.PHONY: build/debug build/sanitize build/coverage

debug: build/debug
	@cd $< && $(CURDIR)/$(PYTEST) --capture=sys $(COMPILED_TESTS)

# These tests count page faults or mappings, to which the sanitizer adds, or start a program that fails with libasan.
UNSANITIZED := _core/kernels/test_arithmetic.py::test_the_environment_chooses \
  _core/kernels/test_arithmetic.py::test_an_unknown_instruction_set_is_refused \
  _core/kernels/test_digest_cuda.py::test_it_compiles_for_devices \
  _core/kernels/test_digest_cuda.py::test_it_links_with_the_runtime \
  memory/test_arena.py::test_steady_state_neither_faults_nor_maps \
  memory/test_segments.py::test_populated_memory_is_touched_without_faults \
  memory/test_segments.py::test_some_pages_can_be_populated_ahead_of_writing

sanitize: build/sanitize
	@cd $< && $(SANITIZED) $(CURDIR)/$(PYTEST) --capture=sys $(COMPILED_TESTS) $(UNSANITIZED:%=--deselect=tests/unit/%)

# Tests take five to ten times as long there. Of the process tests, only those run that call the API in the test's own
# process, because lines of other processes are not counted. Each part writes its own file; then the files are combined.
# Status 1 (tests failed) is accepted: a bound in seconds may be too short here, and `make test` checks the tests.
COUNTED := unit sim process
# Long searches in compiled code are left out: they take an hour here, and reach no line that shorter ones do not reach.
SEARCHES := few_members_get_the_best_ring[8-25] few_members_get_the_best_ring[9-8] a_dozen_members_by_another_proof \
  a_hidden_ring_is_found a_hundred_members_come_close_to_what_nobody_can_beat many_members_come_close_to_the_best_known
COUNTED_unit := tests/unit $(addprefix --deselect=tests/unit/_core/solver/test_solver.py::test_,$(SEARCHES))
COUNTED_sim := tests/sim
COUNTED_process := $(addprefix tests/process/test_,$(addsuffix .py,all_reduce attributes master_node membership \
  optimize quantized reduce_async reduce_errors shared_state state_glue status))

coverage: build/coverage
	@rm -f $</.coverage*
	@+$(SUBMAKE) --output-sync=target --keep-going $(addprefix coverage-,$(COUNTED))
	@cd $< && $(CURDIR)/$(BIN)/coverage combine --quiet && $(CURDIR)/$(BIN)/coverage json --quiet -o build/coverage.json
	@cd $< && $(CURDIR)/$(BIN)/python -m tests.coverage_table build/coverage.json pccl

coverage-%:
	@echo "pytest $(COUNTED_$*)"
	@cd build/coverage && $(CURDIR)/$(BIN)/coverage run --parallel-mode -m pytest -q --timeout 3600 \
	  --override-ini faulthandler_timeout=0 $(patsubst %,'%',$(COUNTED_$*)) || [ $$? -eq 1 ]

# --- Demo, stress, benchmarks -----------------------------------------------

demo: build
	@$(BIN)/pccl demo --plot build/demo.png

# First the machines, in virtual time and with random bytes, because they fail fast; then real processes.
stress: build
	@$(BIN)/python -m tests.fuzz --frames 1000000
	@$(BIN)/python -m tests.sim --hours 0.1
	@PCCL_TEST_RINGS=all PCCL_TEST_HUGE_BYTES=4300000000 $(BIN)/python -m pytest -q tests/process/test_all_reduce.py
	@PCCL_TEST_KILLS=1000 $(BIN)/python -m pytest -q tests/process/test_kills.py
	@PCCL_TEST_REDUCE_KILLS=2000 $(BIN)/python -m pytest -q tests/process/test_reduce_kills.py
	@PCCL_TEST_SYNC_KILLS=2000 $(BIN)/python -m pytest -q tests/process/test_sync_kills.py
	@PCCL_TEST_MATRIX=all $(BIN)/python -m pytest -q tests/process/test_fault_points.py
	@$(BIN)/pccl stress --churn --duration 10m --all-paths --report build/stress

# Needs torch: the benchmarks compare with its Gloo.
bench: setup
	@$(BIN)/python -m benchmarks.control
	@$(BIN)/python -m benchmarks.growth
	@$(BIN)/python -m benchmarks.kernels
	@$(BIN)/python -m benchmarks.digest
	@$(BIN)/python -m benchmarks.latency
	@$(BIN)/python -m benchmarks.shared_state
	@$(BIN)/python -m benchmarks.pool
	@$(BIN)/python -m benchmarks.recovery
	@$(BIN)/python -m benchmarks.solver
	@$(BIN)/python -m benchmarks.quantized
	@$(BIN)/python -m benchmarks.all_reduce --plot build/all_reduce.png
	@$(BIN)/python -m benchmarks.wan --quick --json build/wan.json || [ $$? -eq 2 ]  # 2: needs root
	@$(BIN)/python -m benchmarks.topology || [ $$? -eq 2 ]

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find pccl -name '*.so' -delete
	find pccl cli stress tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
