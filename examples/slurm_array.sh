#!/bin/bash
# Explain a folder of any size as a job array: sbatch examples/slurm_array.sh photos/ explained/
#
# Each job takes its share. One that is stopped, by its time limit or by a failing node, goes on where it was when the same
# line is submitted again. When all are through, `gradcam report explained/` makes one gallery of all shares.
#
#SBATCH --job-name=explain
#SBATCH --array=1-8
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@60

set -euo pipefail
pictures=${1:?the folder of pictures}
output=${2:?the folder for the results}

# Outside of Slurm it is the only job.
exec gradcam batch "$pictures" --output "$output" --resume \
    --shard "${SLURM_ARRAY_TASK_ID:-1}/${SLURM_ARRAY_TASK_COUNT:-1}"
