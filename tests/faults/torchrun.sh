#!/bin/sh
# Instead of torchrun, where only what Slurm and the job script do matters.
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS torchrun $*"
exec sleep 600
