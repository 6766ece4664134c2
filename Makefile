# `make` alone lists the targets.
.DEFAULT_GOAL := help
python := .venv/bin/python

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: ## install what is missing: system libraries, uv, the locked .venv
	@bash setup.sh

test: setup vllm-releases ## everything, real vLLM servers included (under 20 minutes)
	$(python) -m pytest

test-fast: setup ## without vLLM (under a minute)
	$(python) -m pytest -m "not slow and not e2e"

lint: setup ## ruff, as the tests expect it
	$(python) -m ruff check .
	$(python) -m ruff format --check .

sweep: ## the main job: the same as bash run_all.sh
	bash run_all.sh

overhead: setup ## what the instrumentation itself costs an engine step
	$(python) -m microbench.overhead

driver-lag: setup ## how late the load driver sends, at 10 to 1,000 requests a second
	$(python) -m microbench.driver_lag

bench-report: setup ## time and memory of analysing 10 million records
	$(python) -m tests.microbench.bench_report

vllm-source: setup ## the installed release's source, tests included, in third_party/vllm
	bash fetch_vllm.sh 0.18.1 third_party/vllm

# The releases that the step-timing patches are tested on besides the installed one.
vllm-releases: setup third_party/vllm-0.22.1 third_party/vllm-0.33.0 ## sources of later releases

third_party/vllm-%:
	bash fetch_vllm.sh $* $@

lock: setup ## resolve pyproject.toml anew into locks/
	@for flavour in cpu gpu; do \
	    uv pip compile -q pyproject.toml --extra $$flavour --group dev --universal \
	        --generate-hashes --no-annotate --no-header -o locks/$$flavour.txt; done

clean: ## remove runs, fetched sources and the environment
	rm -rf runs third_party .venv .uv .setup.lock

.PHONY: help setup test test-fast lint sweep overhead driver-lag bench-report \
	vllm-source vllm-releases lock clean
