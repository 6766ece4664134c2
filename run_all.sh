#!/usr/bin/env bash
# The main job: measure what each KV connector costs per engine step, and report.
#   bash run_all.sh [--profile NAME] [--only CONFIG] [--repeats N] [--model PATH]
#                   [--python PATH | --vllm VERSION] [--out DIR [--resume]] [--profile-cpu]
#                   [--connector MODULE:CLASS [--connector-config JSON]] [--limits FILE]
#                   [--ray ADDRESS] [--check]
# NAME is a file of configs/profiles/: cpu (the default), cpu-smoke, gpu, ...
# The run goes to runs/, and its result to SUMMARY.md, report.html, per_config.json and
# figures/ here.
# With --out DIR, everything goes to DIR alone.
# --python measures the vLLM of another Python, and leaves it as it is; --vllm a release
# of locks/releases/, in an environment that is made for it (up to 9 GB).
# --connector measures your own connector beside plain vLLM, after a minute in which it is
# looked at along other axes than cached blocks; --limits says what it may cost.
# --profile-cpu then samples one more server of each config: where in the code its time goes.
# --ray measures on all hosts of a Ray cluster (docs/hosts.md).
# --check only says what would stop the run: status 0 if nothing would, else 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Works before anything is installed.
if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    sed -n '2,/^[^#]/s/^# \?//p' run_all.sh
    exit
fi

profile=cpu check='' before='' module=microbench.sweep
for argument; do
    [[ $argument == --connector || $argument == --connector=* ]] && module=observatory.own
    [[ $before == --profile ]] && profile=$argument
    [[ $argument == --profile=* ]] && profile=${argument#*=}
    [[ $argument == --check ]] && check=yes
    before=$argument
done

# Checking must not put another flavour in the place of an environment.
flavour=''
if [[ -z $check || ! -f .venv/.installed_lock ]]; then
    flavour=$(sed -n 's/^flavour *= *"\(.*\)".*/\1/p' "configs/profiles/$profile.toml" 2>/dev/null || true)
fi
if [[ $flavour == gpu ]] && ! type -P nvidia-smi >/dev/null; then
    echo "run_all: profile $profile needs a GPU, and there is no nvidia-smi here;" \
        "--profile cpu runs without one" >&2
    exit 1
fi
# Without a flavour, the one that is installed is kept.
bash setup.sh ${flavour:+"$flavour"}
exec .venv/bin/python -m "$module" "$@"
