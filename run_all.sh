#!/usr/bin/env bash
# The main job: measure what each KV connector costs per engine step, and report.
#   bash run_all.sh [--profile NAME] [--only CONFIG] [--repeats N] [--model PATH]
#                   [--out DIR [--resume]] [--py-spy]
# NAME is a file of configs/profiles/: cpu (the default), cpu-smoke, gpu, ...
# The run goes to runs/, and its result to SUMMARY.md, per_config.json and figures/ here.
# With --out DIR, everything goes to DIR alone.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Works before anything is installed.
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^[^#]/s/^# \?//p' run_all.sh
    exit
fi

flavour=cpu
[[ " $* " == *" gpu "* || " $* " == *"=gpu "* ]] && flavour=gpu
bash setup.sh "$flavour"
exec .venv/bin/python -m microbench.sweep "$@"
