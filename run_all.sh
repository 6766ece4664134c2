#!/usr/bin/env bash
# The main job: measure what each KV connector costs per engine step, and report.
# Installs what is missing (setup.sh), then runs `kvtax sweep` with the same options.
#
#   bash run_all.sh [--profile NAME] [--only CONFIG]... [--repeats N] [--model PATH]
#                   [--connector MODULE:CLASS [--connector-config JSON|@FILE]] [--limits FILE]
#                   [--python PATH | --vllm VERSION] [--out DIR [--resume]]
#                   [--profile-cpu] [--ray ADDRESS [--insecure]]
#                   [--check | --report RUN]
#
# The run goes to runs/NAME or --out DIR, and so does its result: SUMMARY.md, report.html,
# per_config.json and figures/. Only a run of the whole default profile, without --out,
# puts its result here, and into the pages that quote it; `git diff` shows what changed.
#   --profile NAME       a file of configs/profiles/: cpu (the default), cpu-smoke, gpu ...
#   --only CONFIG        measure this config (repeatable)
#   --repeats N          servers per config (default: the profile's)
#   --model PATH         real weights (gpu profile)
#   --connector CLASS    measure your own connector: along all axes (a minute), then
#                        beside plain vLLM and a no-op
#   --connector-config   JSON object, or @FILE with one, added to its kv_transfer_config
#   --limits FILE        limits to check, such as configs/limits/ci.toml
#   --python PATH        measure the vLLM of this Python, and leave it as it is
#   --vllm VERSION       measure this release, in a new environment (up to 9 GB)
#   --resume             keep the finished trials of --out
#   --profile-cpu        then sample one more server of each config: where CPU time goes
#   --ray ADDRESS        measure on all hosts of a Ray cluster (docs/operate.md)
#   --insecure           use a Ray cluster that asks for no token
#   --check              only list what would stop the run
#   --report RUN         only analyse the folder of a run, or its evidence.json.gz, again
# Exit codes: 0 good, 1 a limit is broken or a verdict is not the expected one, 2 bad
# input, 3 could not measure, 130 and 143 ended by a signal.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Works before anything is installed.
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^[^#]/s/^# \?//p' run_all.sh
    exit
fi

profile=cpu option='.* --profile[ =]([^ ]+)'
if [[ " $*" =~ $option ]]; then profile=${BASH_REMATCH[1]}; fi

# A check or a report must not replace an installed environment by another flavour's.
flavour=''
if [[ ! -f .venv/.installed_lock || " $* " != *" --check "* && " $* " != *" --report"* ]]; then
    flavour=$(sed -n 's/^flavour *= *"\(.*\)".*/\1/p' "configs/profiles/$profile.toml" 2>/dev/null || true)
fi
if [[ $flavour == gpu ]] && ! type -P nvidia-smi >/dev/null; then
    echo "run_all: profile $profile needs a GPU, and there is no nvidia-smi here;" \
        "--profile cpu runs without one" >&2
    exit 3
fi
# Without a flavour, setup.sh keeps the installed one.
bash setup.sh ${flavour:+"$flavour"}
exec .venv/bin/python -m kvtax sweep "$@"
