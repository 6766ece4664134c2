# `make` alone lists the targets.
.DEFAULT_GOAL := help
python := .venv/bin/python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

setup: ## install what is missing: system libraries, uv, the locked .venv (cpu, or the flavour it has)
	@bash setup.sh

fresh-machine-check: ## does it work on minimal Debian 12 and 13? (needs root, mmdebstrap, 25 GB; 20 minutes)
	bash tests/fresh_machine/check.sh

test: setup vllm-releases browser ## all tests but the long ones, with real vLLM servers (20 minutes)
	$(python) -m tests

test-all: setup vllm-releases browser ## all tests, the long ones too
	$(python) -m pytest -m ""

test-fast: setup ## the tests that need no vLLM (a minute)
	$(python) -m tests -m "not slow and not e2e and not long"

direct-read-test: setup ## direct read: the storm, a million hostile frames, two real servers (10 minutes)
	$(python) -m pytest -m "" tests/connectors tests/patched/test_ledger_*.py \
	    tests/patched/test_hooks.py tests/patched/test_admission.py \
	    tests/patched/test_fingerprint.py tests/patched/test_storm.py \
	    tests/e2e/direct_read \
	    tests/costs/test_direct_read_cost.py

direct-read-storm: setup ## direct read: 10,000 requests on two real engines, with controls that must fail (10 minutes)
	$(python) -m costs.direct_read.storm --requests 10000 --out runs/direct_read_storm.json

fleet-test: setup vllm-releases ## the fleet's tests, with real vLLM instances (20 minutes)
	$(python) -m pytest -m "" tests/fleet tests/e2e/test_fleet_launch.py \
	    tests/e2e/test_fleet_workers.py tests/e2e/test_offloads.py

proxy-fuzz: setup ## ten million changed requests, answers, bodies and streams for the proxy's readers (15 minutes)
	FUZZ_CASES=2500000 $(python) -m pytest -m long tests/fleet/proxy/test_proxy_fuzz.py

hosts-test: setup ## virtual time, a sweep and fleets on a Ray cluster, hosts of which are lost (needs root; 35 minutes)
	$(python) -m pytest -m "" tests/hosts

fleet-experiment: setup ## compare routing policies on coding sessions, on four instances (48 minutes)
	$(python) -m fleet.experiment configs/experiments/policies.toml

lint: setup ## ruff: check and format
	$(python) -m ruff check .
	$(python) -m ruff format --check .

sweep: ## the main job, the same as bash run_all.sh
	bash run_all.sh

overhead: setup ## what the step records themselves cost an engine step
	$(python) -m costs.hooks

step-cost: setup ## Mooncake's get_finished in a step, before and after the short-circuit
	$(python) -m costs.get_finished

direct-read-cost: setup ## what being read costs an engine step, and what a reader gets (10 minutes)
	$(python) -m costs.direct_read.cost
	$(python) -m costs.direct_read.transfer

exposure-cost: setup ## which of a connector's work users feel under asynchronous scheduling (20 minutes)
	$(python) -m costs.exposure

schedule-cost: setup ## what a connector adds to schedule(), paired inside one process (5 minutes)
	$(python) -m costs.schedule

growth-cost: setup ## two connectors' scheduler side before and after a fix, as requests or contexts grow (15 minutes)
	$(python) -m costs.growth

listener-cost: setup ## what listening to the block pool costs, per block and per take
	$(python) -m costs.listener

sending-lag: setup ## how late our load generators send, at 10 to 1,000 requests per second
	$(python) -m costs.senders --only fleet.replay --only microbench.driver

proxy-cost: setup ## what the proxy adds to TTFT, and how much a core carries (needs Go)
	$(python) -m costs.proxy

virtual-cost: setup ## how fast and how big a fleet in virtual time is, and how far above its floor (5 minutes)
	$(python) -m costs.virtual

trace-cost: setup ## time and memory of traces of two million requests
	$(python) -m costs.traces

hosts-cost: setup ## what handing out a task to a host of a Ray cluster costs, and many runs (4 minutes)
	$(python) -m costs.hosts
	$(python) -m costs.hosts.cells

hosts-with-and-without: setup ## does Ray on a host change what a sweep measures there? (13 minutes)
	$(python) -m costs.hosts.with_and_without

hosts-study: setup ## 120 runs in virtual time on three hosts, one lost midway, and here: equal bytes? (needs root)
	$(python) -m tests.hosts.lost_midway configs/experiments/seeds.toml --out runs/hosts-study

transfer-check: setup ## does Mooncake report a write over TCP before the bytes arrive?
	$(python) -m lab.serving.transfer_check

verdict-power: setup ## how small a growth a sweep still catches, from the run RUN=DIR
	$(python) -m costs.power $(RUN) --flat noop --flat liars/honest --flat liars/constant --draws 8

observatory: setup ## what every connector costs per step on every release (hours, 12 GB; goes on where it was stopped)
	$(python) -m observatory $(if $(RAY),--ray $(RAY))

axes-gate-check: setup ## does the gate along the axes catch broken connectors? (40 minutes)
	$(python) -m costs.axes_gate

noisy-sweep: setup ## the sweep beside a neighbour who takes 0 to 100 % of a core (25 minutes)
	$(python) -m costs.stressor -- bash run_all.sh --out runs/noisy

bench-report: setup ## time and memory of analysing 10 million steps
	$(python) -m costs.report

bench-look: setup ## time and memory of a look at 100 million steps of 64 servers (15 minutes, 9 GB of disk)
	$(python) -m costs.look

bench-merge: setup ## 100 million steps counted on three hosts and merged, against on one (15 minutes, 9 GB of disk)
	$(python) -m costs.look.merged

coverage: setup ## do intervals over a few server processes hold the truth? (simulated)
	$(python) -m lab.stats.coverage

browser: ## install Chromium, for the tests of the reports' pages; without it they are skipped
	@type chromium >/dev/null 2>&1 || bash tests/page/install_browser.sh

# Sources of the releases that the patches are tested on, with upstream's own tests.
releases = 0.18.1 0.22.1 0.25.1 0.28.0 0.30.0 0.32.0 0.33.0
vllm-releases: setup $(releases:%=third_party/vllm-%) ## fetch the sources of vLLM's releases

third_party/vllm-%:
	bash fetch_vllm.sh $* $@

upstream-check: vllm-releases ## check the series for upstream: it applies, and upstream's tests end as before
	$(python) -m upstream.check

upstream-series: vllm-releases ## make the series for upstream again from patches/
	$(python) -m upstream.series

# What the patches do, in real vLLM of another release of locks/releases/.
release-test: setup ## test what the patches do on another release: VLLM=0.32.0 (up to 9 GB, once)
	TEST_VLLM=$(VLLM) $(python) -m pytest -m "" tests/patched \
	    tests/patches/test_step_timing.py tests/patches/test_step_timing_hooks.py \
	    tests/e2e/test_transfers.py

# The prefix index needs Go and no Python.
kvindex-test: ## test the prefix index, its adapter and the patches on llm-d-kv-cache (needs Go and git)
	cd kvindex && go vet ./... && go test -race ./...
	cd kvindex && go test -run '^$$' -fuzz FuzzIndex -fuzztime 30s .
	cd kvindex/llmd && go vet ./... && go test -race ./...
	cd kvindex/llmd/router && go vet ./... && go test -race ./...
	cd kvindex/cmd/kvbench && CGO_ENABLED=0 go vet ./... && CGO_ENABLED=0 go test ./...
	cd kvindex/cmd/kvindexd && go vet ./... && go test -race ./...
	cd kvindex/cmd/kvindexd && go test -run '^$$' -fuzz FuzzDecode -fuzztime 30s ./events
	cd kvindex/cmd/kvindexd && go test -run '^$$' -fuzz FuzzLookup -fuzztime 30s ./server
	bash patches/llm-d-kv-cache/check.sh

kvindexd: ## build the prefix index as a service (needs Go)
	cd kvindex/cmd/kvindexd && CGO_ENABLED=0 go build -o ../../bin/kvindexd .

kvindexd-bench: kvindexd ## what a lookup and an event cost kvindexd, in process and over a socket (2 minutes; needs Go)
	cd kvindex/cmd/kvindexd && CGO_ENABLED=0 go test -run '^$$' -bench . -benchtime 2s ./names ./fleet
	cd kvindex/cmd/kvindexd && CGO_ENABLED=0 go build -o ../../bin/kvload ./kvload
	for tokens in 16 128; do kvindex/bin/kvload -kvindexd kvindex/bin/kvindexd -block-tokens $$tokens; done
	kvindex/bin/kvload -kvindexd kvindex/bin/kvindexd -json

kvindex-bench: ## compare the prefix index with upstream's and other designs (20 minutes; needs Go and git)
	bash kvindex/cmd/kvbench/build_variants.sh kvindex/bin
	cd kvindex && bin/kvbench run -bin bin -traces ../traces -out results.json -rounds 3
	cd kvindex && bin/kvbench report -in results.json -readme README.md -md RESULTS.md

kvindex-profile: ## where upstream's lookups spend their time, as it is and with Peek (1 minute; needs Go and git)
	bash kvindex/cmd/kvbench/build_variants.sh kvindex/bin
	cd kvindex && { printf '# Where upstream spends the time of a lookup\n\nMade by `make kvindex-profile`.\n\n'; \
	    bin/kvbench profile -name upstream && bin/kvbench-peek profile -name upstream-peek; } > bin/PROFILE.md
	mv kvindex/bin/PROFILE.md kvindex/PROFILE.md

llmd-bench: ## an answer of llm-d's scorer, with its own index and with kvindex (3 minutes; needs Go)
	cd kvindex/llmd/router && CGO_ENABLED=0 go test -c -o ../../bin/llmd-bench .
	for round in 1 2 3; do kvindex/bin/llmd-bench -test.run '^$$' -test.bench Burst -test.benchtime 20x; done

kvindex-figures: setup ## draw kvindex/figures from kvindex/results.json
	$(python) -m kvindex.figures

lock: export PATH := $(CURDIR)/.uv/bin:$(PATH)
lock: setup ## resolve pyproject.toml into locks/ again
	@for flavour in cpu gpu; do \
	    uv pip compile -q pyproject.toml --extra $$flavour --group dev --universal \
	        --generate-hashes --no-annotate --no-header -o locks/$$flavour.txt; done
	@cd locks && for version in 0.18.1 0.33.0; do \
	    uv pip compile -q --no-config upstream-$$version.in \
	        --override upstream-$$version.override --python-version 3.11 \
	        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	        --no-header -o upstream-$$version.txt; done
	@cd locks && for name in aiperf vllm-router; do \
	    uv pip compile -q --no-config $$name.in --python-version 3.11 \
	        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	        --no-header -o $$name.txt; done
	@cd locks/releases && for input in *.in; do \
	    uv pip compile -q --no-config $$input --override $${input%.in}.override \
	        --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	        --generate-hashes --no-annotate --no-header -o $${input%.in}.txt; done
	@cd locks/beside && for input in *.in; do \
	    uv pip compile -q --no-config --no-deps $$input \
	        --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	        --generate-hashes --no-annotate --no-header -o $${input%.in}.txt; done

clean-releases: ## remove the environments of other vLLM releases, and of vllm-router
	rm -rf .releases

clean: clean-releases ## remove runs, fetched sources and the environment
	rm -rf runs third_party .venv .uv .setup.lock

.PHONY: help setup fresh-machine-check test test-all test-fast direct-read-test direct-read-storm \
	fleet-test hosts-test proxy-fuzz fleet-experiment lint sweep overhead step-cost \
	direct-read-cost exposure-cost growth-cost listener-cost sending-lag proxy-cost trace-cost hosts-cost \
	hosts-with-and-without hosts-study \
	transfer-check bench-report bench-look browser observatory axes-gate-check noisy-sweep verdict-power coverage \
	vllm-releases upstream-check \
	upstream-series release-test kvindex-test kvindexd kvindexd-bench kvindex-bench kvindex-profile llmd-bench kvindex-figures lock clean-releases clean
