#!/bin/bash
# Explain a folder of any size as a job array: sbatch examples/slurm_array.sh photos/ explained/
#
# Each job explains its share of the images. If a time limit or a failing node stops a job, submit the same line again.
# The job then continues where it stopped. When all jobs are done, `gradcam report explained/` makes one gallery of all
# shares.
#
#SBATCH --job-name=explain
#SBATCH --array=1-8
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@60

set -euo pipefail
images=${1:?usage: slurm_array.sh IMAGES OUTPUT (IMAGES is missing)}
output=${2:?usage: slurm_array.sh IMAGES OUTPUT (OUTPUT is missing)}

# Outside Slurm, one job explains all images.
exec gradcam batch "$images" --output "$output" --resume \
    --shard "${SLURM_ARRAY_TASK_ID:-1}/${SLURM_ARRAY_TASK_COUNT:-1}"
