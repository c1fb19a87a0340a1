#!/bin/bash
# Train on several nodes under Slurm: one torchrun a node, which starts one process for each GPU.
#
#   sbatch examples/slurm.sh examples/train_gpt.yaml --directory runs/gpt
#
# A job that is preempted or runs out of time is put back in the queue; `--resume last` then goes on from the last
# checkpoint, also with another number of nodes, since checkpoints fit any plan.
#SBATCH --job-name=shardwright
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=SIGTERM@120
#SBATCH --output=%x-%j.out
set -euo pipefail

export OMP_NUM_THREADS=8
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

srun torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "${nodes[0]}:29500" \
    --max-restarts 3 --no-python \
    shardwright train "$@" --resume last

# Without torchrun, one task of srun for each GPU does too (ntasks-per-node=8); ranks are read from what Slurm says:
#
#   srun shardwright train "$@" --resume last
