#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# kvtax on the nodes of a Slurm job. From the checkout, on a file system that all nodes have:
#   sbatch --nodes=3 docs/hosts/slurm.sh bash run_all.sh --repeats 6 --out runs/slurm
# --ray is added to the command, which runs on the first node.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=04:00:00
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?this is for sbatch}"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Servers must not wait for whatever else runs. symmetric-run looks for `ray` in PATH.
export RAY_worker_niceness=0 PATH=$PWD/.venv/bin:$PATH
# Without a token whoever reaches the nodes could run anything on them. srun hands it on.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
# A task is one process to Slurm, and would be bound to one core.
srun --cpu-bind=none ray symmetric-run --address "$first:6379" \
    --min-nodes "$SLURM_JOB_NUM_NODES" --disable-usage-stats \
    --resources '{"kvtax": 1}' -- "$@" --ray auto
