# Each target makes .venv and installs what it needs by itself; constraints.txt pins every version.
# Variables: PYTHON (the interpreter .venv is made with), NPROC (ranks of `make train`), BENCH (which benchmarks),
# PART (which folder of tests `make prove` takes), WORKERS (how many test files run at a time),
# GPU_REPORT (the folder that `make gpu` and `make gpus` write to), ARGS (more options).
PYTHON ?= python3
NPROC ?= 2
CONFIG ?= configs/bunny.toml
BENCH ?= collectives norms offload attention
PART ?=
WORKERS ?= 2
ARGS ?=
GPU_REPORT ?= runs/first_gpu

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# One thread per rank: with more, ranks fight for the cores.
export OMP_NUM_THREADS ?= 1
# Nothing is fetched from a hub, and the ranks of one machine talk over loopback.
export HF_HUB_OFFLINE ?= 1
export GLOO_SOCKET_IFNAME ?= $(if $(filter Darwin,$(shell uname -s)),lo0,lo)
# Tests are run by many processes, which are to find them compiled.
export PYTHONDONTWRITEBYTECODE :=
# A file's tests share their ranks and stay together. They are for a CPU; those for a GPU are run by `make gpu`.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile
LAUNCH := $(BIN)/torchrun --standalone --local-addr 127.0.0.1

# What torch 2.13.0 requires on Linux, where its default build brings it. No pin: torch has one.
TRITON := triton==3.7.1

.PHONY: help train test test-core prove bench faults gpu gpus docs resolve versions lint clean
help:
	@echo "make train   train a video transformer on a real clip, on $(NPROC) ranks of this machine: its GPUs, or CPU cores"
	@echo "make test    run every behaviour once"
	@echo "make test-core run those of the library alone, without what takes long, in two minutes"
	@echo "make prove   run every test: all matrices, defects, peers and launchers (PART=verify: those of tests/verify)"
	@echo "make bench   measure on this machine: collectives, norms, offload, attention (BENCH=offload: one of them)"
	@echo "             and how a step scales over ranks, and what each technique saves: BENCH='scaling techniques'"
	@echo "             attention beside peers that need their own environment: BENCH=attention ARGS=--install-peers"
	@echo "make faults  kill, stop and starve ranks, damage files, fill disks; count what came of it, by kind"
	@echo "make gpu     run on an NVIDIA GPU all that waits for one, in 10 minutes (13 at most); the report: $(GPU_REPORT)/report.md"
	@echo "make gpus    the same for what waits for 2 to 8 GPUs in one machine"
	@echo "make docs    build the guides and the API as a site, build/site/html/index.html; a broken link ends it"
	@echo "make resolve try, without installing, whether all that is installed here can be had on other machines"
	@echo "make versions run the tests on the lowest and the newest versions that setup.py promises, each installed apart"
	@echo "make lint    ruff and mypy"

train: .venv/.train data/bunny/metadata.jsonl
	$(LAUNCH) --nproc-per-node $(NPROC) -m opensora_accel.cli train --config $(CONFIG) $(ARGS)

test: .venv/.dev data/bunny/metadata.jsonl
	$(PYTEST) -m "not prove and not alone" $(ARGS)

# Tests of the rooms that a training loop imports, and of how they stand together.
CORE = attention checkpoint communications fsdp offload opensora_models shardformer sharding \
  $(addsuffix .py,$(addprefix test_,arguments deferred flash_attn layers links names parallel_states plan precision wrapping))

test-core: .venv/.dev
	$(PYTEST) -m "not prove and not alone and not slow" $(addprefix tests/,$(CORE)) $(ARGS)

prove: .venv/.dev .venv/.docs .venv/.kernels .venv/.deepspeed .venv/.peers .venv/.trackers .venv/.uv data/bunny/metadata.jsonl
	$(PYTEST) -m "not alone" tests/$(PART) $(ARGS)
	@# What measures time has nothing beside it. A PART may have none: status 5.
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -m alone tests/$(PART) $(ARGS) || test $$? -eq 5

faults: .venv/.dev data/bunny/metadata.jsonl
	$(PYTEST) -m faults $(ARGS)

bench: .venv/.dev
	@set -e; for name in $(BENCH); do echo "tools/bench/$$name.py"; $(BIN)/python tools/bench/$$name.py $(ARGS); done

# Without a CUDA build of torch it says what to install, and runs what it can.
gpu: .venv/.dev data/bunny/metadata.jsonl
	$(BIN)/python tools/first_gpu.py --out $(GPU_REPORT) $(ARGS)

gpus: .venv/.dev data/bunny/metadata.jsonl
	$(BIN)/python tools/first_gpu.py --out $(GPU_REPORT) --node $(ARGS)

docs: .venv/.docs
	$(BIN)/python tools/build_docs.py $(ARGS)

resolve: .venv/.uv
	$(BIN)/python tools/resolve.py $(ARGS)

versions: .venv/.uv
	$(BIN)/python tools/versions.py $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first: whatever asks for it without a version would bring another build.
.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "diffusers 0.42 needs Python 3.11 or newer; name one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test -d .venv || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing torch"
	@$(PIP) install -c constraints.txt torch
	@touch $@

.venv/.train: .venv/.torch setup.py pyproject.toml
	@echo "installing what training needs"
	@$(PIP) install -c constraints.txt -e '.[train,plot]'
	@touch $@

.venv/.dev: .venv/.train
	@echo "installing what the tests need"
	@$(PIP) install -c constraints.txt -e '.[train,plot,schedulefree,dev]'
	@# Apart, because with it diffusers warns of missing GPU libraries whenever it is imported.
	@$(PIP) install -c constraints.txt --no-deps --target .venv/lowbit torchao
	@touch $@

.venv/.kernels: .venv/.torch setup.py
	@echo "installing Triton, which interprets the kernels for a GPU"
	@# Apart, because it takes 1 GB and torch for a CPU has no use for it. There are wheels for Linux alone.
	@$(BIN)/python -c 'import triton' 2>/dev/null || \
	  $(PIP) install -c constraints.txt --no-deps --target .venv/kernels $(TRITON) || \
	  echo "there is no Triton for this machine; the tests of its kernels will be skipped"
	@touch $@

.venv/.deepspeed: .venv/.torch constraints.txt
	@echo "installing DeepSpeed, which the tests of its loop run"
	@# Apart, because its requirements are nobody else's. Its operators are not built.
	@$(PIP) install -c constraints.txt --no-deps --no-build-isolation --target .venv/deepspeed \
	  deepspeed einops hjson msgpack py-cpuinfo || \
	  echo "there is no DeepSpeed for this machine; the tests of its loop will be skipped"
	@touch $@

.venv/.peers: .venv/.torch constraints.txt
	@echo "installing peers whose faults tools/repro shows, and whose codes are compared"
	@# Apart, because nothing else needs them.
	@$(PIP) install -c constraints.txt --no-deps --target .venv/peers \
	  yunchang ring-attention-pytorch beartype einops jaxtyping wadler_lindig bitsandbytes || \
	  echo "peers cannot be had here; the tests of tools/repro skip their scripts, and that of nf4 its reference"
	@touch $@

.venv/.docs: .venv/.train constraints.txt
	@echo "installing Sphinx, which makes a site of the guides"
	@$(PIP) install -c constraints.txt sphinx myst-parser furo sphinx-copybutton
	@touch $@

.venv/.uv: .venv/.train
	@echo "installing uv, which resolves the installs for other machines"
	@$(PIP) install -c constraints.txt uv
	@touch $@

.venv/.trackers: .venv/.dev constraints.txt
	@echo "installing wandb and trackio, and pyarrow for clips in parquet"
	@$(PIP) install -c constraints.txt wandb pyarrow
	@# Apart, because it asks for another Pillow than the one that is pinned, with which it works.
	@$(PIP) install -c constraints.txt --no-deps --target .venv/trackio \
	  trackio gradio_client httpcore httpx orjson starlette uvicorn || \
	  echo "trackio cannot be had here; its test will be skipped"
	@touch $@

data/bunny/metadata.jsonl: | .venv/.train
	$(BIN)/python tools/prepare_bunny.py data/bunny

clean:
	rm -rf .venv .bench-venv build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache
