# Everything below needs only make and a Python 3.11 or newer; the first target you call builds the environment.
#
#   make demo          train a small network on sky:0
#   make test          the fast tests
#   make e2e           the tests on a real Kubernetes control plane; needs root, and six minutes more the first time
#   make e2e-real      the same on real nodes, with kubelets, containerd and images; needs root, and ten minutes more the first time
#   make e2e-cel       the custom resource's CEL rules on a server that evaluates them; minutes more the first time
#   make check         all fast checks: lint types imports docs test

VENV ?= .venv
TORCH ?= torch==2.13.0
JOBS ?= 2
# Test processes and their workers share few cores: more threads would only get into each other's way.
OMP_NUM_THREADS ?= 1

ANY_PYTHON := $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { command -v "$$p"; break; }; done)
PYTHON ?= $(ANY_PYTHON)

BIN := $(VENV)/bin
# Another torch, or a change in pyproject.toml, makes another environment.
READY := $(VENV)/.ready-$(subst /,-,$(subst =,-,$(TORCH)))

.DEFAULT_GOAL := help
.PHONY: help demo test slow notebooks firstrun firsthour conformance matrix upstream gpu e2e e2e-real e2e-cel fuzz fuzz-layouts fuzz-programs fuzz-scenarios mixed-devices proof lock sbom audit site bench check format lint types imports docs environment clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' $(firstword $(MAKEFILE_LIST))
	@echo "also: slow notebooks firstrun firsthour conformance matrix upstream gpu fuzz fuzz-layouts fuzz-programs fuzz-scenarios mixed-devices proof bench format environment clean lock sbom audit site"

environment: $(READY)

define check_python
@test -n "$(PYTHON)" || { echo "skyproxy needs Python 3.11 or newer, and none was found. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "skyproxy needs Python 3.11 or newer; '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
endef

$(READY): pyproject.toml
	$(check_python)
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@# torch first and by its exact number, so that nothing below can choose another one.
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install "$(TORCH)" -e ".[dev,examples,bench,notebook,plugins,operator,kubernetes,aws,integrations]"
	@# Off the path: where torchvision is there and does not load, transformers cannot be imported either. Both may be
	@# left from an environment that was made before this was known.
	$(BIN)/python -m pip uninstall --quiet --yes timm torchvision
	rm -rf $(VENV)/vision
	$(BIN)/python -m pip install --no-deps --target $(VENV)/vision "timm>=1.0.20" \
		"$$($(BIN)/python -c 'import torch; print("torchvision==0.%d.*" % (int(torch.__version__.split(".")[1]) + 15))')" || \
		echo "no torchvision for this torch: timm's tests are skipped"
	@rm -f $(VENV)/.ready-*
	@touch $@

# An environment of its own, with what a user of the device needs and nothing else; the large one, where it is there.
DEMO := $(VENV)-demo
DEMO_READY := $(DEMO)/$(notdir $(READY))

$(DEMO_READY): pyproject.toml
	$(check_python)
	test -x $(DEMO)/bin/python || "$(PYTHON)" -m venv $(DEMO)
	$(DEMO)/bin/python -m pip install "$(TORCH)" -e ".[torch,examples]"
	@rm -f $(DEMO)/.ready-*
	@touch $@

# One thread: the network is small, and on a busy machine threads that wait for each other took ten times as long.
demo: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
demo: $(if $(wildcard $(READY)),$(READY),$(DEMO_READY))
	$(dir $<)bin/python examples/train_digits.py

test: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow and not conformance and not gpu and not e2e and not notebooks and not firstrun" $(ARGS)

slow: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
slow: $(READY)
	@# A few files hold most of the time, so tests go to whichever process is free. They wait for half of their time, for
	@# processes to start and time-outs to pass, so one more runs than else.
	$(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist worksteal -m "slow and not conformance and not gpu and not e2e and not notebooks and not firstrun" $(ARGS) || \
		{ test $$? -eq 5 && echo "no test is marked slow yet"; }

conformance: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
conformance: $(READY)
	$(BIN)/python -m pytest tests/conformance -n $(JOBS) --dist worksteal -m "not gpu" $(ARGS)

# On the oldest and the newest torch that skyproxy knows, in environments of five gigabytes each outside of the tree.
matrix:
	@test -n "$(PYTHON)" || { echo "skyproxy needs Python 3.11 or newer. Name one: make matrix PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" .ci/matrix.py --jobs $(JOBS) $(ARGS)

# The test suites of timm, peft and accelerate on the CPU and on sky:0, from their source distributions; an environment of
# 1.5 gigabytes outside of the tree.
upstream:
	@test -n "$(PYTHON)" || { echo "skyproxy needs Python 3.11 or newer. Name one: make upstream PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" .ci/upstream.py --torch "$(TORCH)" --jobs $(JOBS) $(ARGS)

# Everything for CUDA, with the interpreter that has a torch for it: make gpu PYTHON=/path/to/python3
gpu:
	@test -n "$(PYTHON)" || { echo "skyproxy needs Python 3.11 or newer. Name one that has a torch for CUDA: make gpu PYTHON=/path/to/python3" >&2; exit 1; }
	"$(PYTHON)" .ci/gpu.py $(ARGS)

notebooks: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
notebooks: $(READY)
	$(BIN)/python -m pytest tests/notebook -m notebooks $(ARGS)

# Fresh environments with the built wheel, as the README and the tutorial say to make them.
firstrun: $(READY)
	$(BIN)/python -m pytest tests/firstrun -m firstrun $(ARGS)

# The table of docs/howto/first-hour.md, measured anew. ARGS=--cluster measures its last row, too.
firsthour: $(READY)
	$(BIN)/python docs/write_first_hour.py $(ARGS)

# SKYPROXY_E2E_KUBECONFIG names another cluster to run against; what needs the kubelet stand-in is skipped then.
e2e: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
e2e: $(READY)
	test -n "$$SKYPROXY_E2E_KUBECONFIG" || tests/e2e/control_plane/build.sh
	$(BIN)/python -m pytest tests/e2e -m e2e $(ARGS)

# On nodes with kubelet, containerd and images that are built here; see docs/topics/end-to-end-tests.md.
e2e-real: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
e2e-real: $(READY)
	tests/e2e/control_plane/build.sh --node
	PYTHON=$(abspath $(BIN))/python tests/e2e/real/images.sh
	$(BIN)/python -m pytest tests/e2e -m e2e --real $(ARGS)

# The CEL rules of the custom resource on a server that evaluates them, which is built first; without root.
e2e-cel: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
e2e-cel: $(READY)
	tests/e2e/cel/build.sh
	$(BIN)/python -m pytest tests/e2e/test_cel_rules.py -m e2e --cel $(ARGS)

# Every package of images and instances by its exact version and the hashes of its files.
lock: $(READY)
	$(BIN)/python .ci/lock.py $(ARGS)

# What the images are made of, in the form of CycloneDX, and what is known against it. Tools of their own environment.
AUDIT := $(VENV)-audit
$(AUDIT)/.ready: Makefile
	$(check_python)
	test -x $(AUDIT)/bin/python || "$(PYTHON)" -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet "cyclonedx-bom>=5,<8" "pip-audit>=2.7,<3" packaging
	@touch $@

sbom: $(AUDIT)/.ready
	$(AUDIT)/bin/python .ci/audit.py sbom $(ARGS)

audit: $(AUDIT)/.ready
	$(AUDIT)/bin/python .ci/audit.py audit $(ARGS)

# The documentation as a website in build/site, with the reference of the Python API; tools of their own environment.
SITE := $(VENV)-site
$(SITE)/.ready: Makefile
	$(check_python)
	test -x $(SITE)/bin/python || "$(PYTHON)" -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet "mkdocs>=1.6,<2" "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=1,<2"
	@touch $@

site: export NO_MKDOCS_2_WARNING := 1
site: $(SITE)/.ready
	$(SITE)/bin/mkdocs build $(ARGS)

# A million hostile inputs: calls of every operator that a client may name, frames, and whole clients that keep no rule.
# A report of each that ends or holds a worker.
fuzz: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
fuzz: $(READY)
	$(BIN)/python -m tests.security.fuzzing --calls 50000 $(ARGS)
	$(BIN)/python -m tests.security.fuzzing --calls 50000 --near $(ARGS)
	$(BIN)/python -m tests.security.graph_fuzzing --graphs 20000
	$(BIN)/python -m tests.security.graph_fuzzing --graphs 40 --mode inductor
	$(BIN)/python -m tests.security.graph_fuzzing --graphs 300 --mode compiled
	$(BIN)/python -m tests.security.snapshot_fuzzing
	$(BIN)/python -m tests.security.hostile_messages
	$(BIN)/python -m tests.security.function_answers

# Each test of docs/reference/patches.md must fail without its replacement; half an hour.
proof: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
proof: $(READY)
	$(BIN)/python .ci/patches_proof.py $(ARGS)

# Inference against PyTorch, with an order of memory that is drawn for each tensor of each operation.
fuzz-layouts: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
fuzz-layouts: $(READY)
	$(BIN)/python -m tests.conformance.layout_fuzz $(ARGS)

# Whole programs that are drawn, on the CPU and on the device, statement by statement; two thousand take ten minutes.
fuzz-programs: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
fuzz-programs: $(READY)
	$(BIN)/python -m tests.conformance.program_fuzz $(ARGS)

# Programs with loops, writes, circles of objects, graphs, trainings and threads that are drawn, beside the CPU.
fuzz-scenarios: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
fuzz-scenarios: $(READY)
	$(BIN)/python -m tests.conformance.scenario_fuzz $(ARGS)

# Each entry of the operator database with each of its tensors on another device; half an hour.
mixed-devices: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
mixed-devices: $(READY)
	$(BIN)/python -m tests.conformance.mixed_sweep $(ARGS)

bench: $(READY)
	$(BIN)/python benchmarks/suite.py $(ARGS)

check: lint types imports docs test

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy
	$(BIN)/basedpyright --pythonpath $(BIN)/python

imports: $(READY)
	$(BIN)/lint-imports --no-logo

docs: $(READY)
	$(BIN)/python docs/check_docs.py
	$(BIN)/python docs/write_patches_reference.py --check

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
