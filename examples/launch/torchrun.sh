#!/bin/bash
# Ranks under torchrun, one a device. On one host:   DEVICES=4 ./torchrun.sh llama parallel.shard=-1
# On several: the same on each, with HOSTS=2, HOST=0 or 1, and MASTER_ADDR, the first host's name.
#
# torchrun starts all ranks again after a failure, and kills what has not saved in --shutdown-timeout seconds
# after a SIGTERM: give it more than a save takes.
exec torchrun \
  --nnodes "${HOSTS:-1}" --node-rank "${HOST:-0}" --nproc-per-node "${DEVICES:-4}" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  --max-restarts "${RESTARTS:-3}" --shutdown-timeout 300 \
  -m tputrain run "$@"
