#!/usr/bin/env bash
# The main job: measure what each KV connector costs per engine step, and report.
#   bash run_all.sh [--profile cpu-smoke|cpu|gpu] [--only CONFIG] [--repeats N]
#                   [--model PATH] [--out DIR [--resume]] [--py-spy]
# The run goes to runs/, its result to SUMMARY.md, per_config.json and figures/ here;
# with --out DIR all of it goes to DIR alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

flavour=cpu
[[ " $* " == *" gpu "* || " $* " == *"=gpu "* ]] && flavour=gpu
bash setup.sh "$flavour"
exec .venv/bin/python -m microbench.sweep "$@"
