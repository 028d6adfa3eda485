#!/usr/bin/env bash
# Train on one host or several, with LiBai's arguments:
#
#   bash tools/train.sh FILE CONFIG PROCESSES [key=value … | --option …]
#   NODE=2 NODE_RANK=0 ADDR=10.0.0.1 PORT=29400 bash tools/train.sh FILE CONFIG PROCESSES …      (on each host, with its NODE_RANK)
#
# FILE is a training script such as tools/train_net.py, or "dufu" (or "-") for the command itself; CONFIG a recipe's name or a file;
# PROCESSES the number of processes on each host. With one host, no PORT is needed: a free one is found.
set -euo pipefail

if [ $# -lt 3 ]; then
  echo "error: usage: [NODE=N NODE_RANK=R ADDR=HOST PORT=P] bash tools/train.sh FILE CONFIG PROCESSES [key=value …]" >&2
  exit 2
fi
file=$1 config=$2 processes=$3
shift 3
nodes=${NODE:-1} rank=${NODE_RANK:-0} address=${ADDR:-127.0.0.1} python=${PYTHON:-python3}

if [ "$nodes" -gt 1 ] && { [ -z "${ADDR:-}" ] || [ -z "${PORT:-}" ]; }; then
  echo "error: NODE=$nodes: several hosts meet at ADDR and PORT of the first one; set both on every host" >&2
  exit 2
fi
if [ "$file" = dufu ] || [ "$file" = - ]; then
  hosts=()
  [ "$nodes" -gt 1 ] && hosts=(--nnodes "$nodes" --node-rank "$rank" --master "$address:$PORT")
  exec "$python" -m dufu.cli.main train "$config" --nproc "$processes" ${hosts[@]+"${hosts[@]}"} "$@"
fi
if [ ! -f "$file" ]; then
  echo "error: $file: no such script; give a file, or \"dufu\" for the command" >&2
  exit 2
fi
meeting=(--standalone)
[ "$nodes" -gt 1 ] && meeting=(--node_rank "$rank" --master_addr "$address" --master_port "$PORT")
exec "$python" -m torch.distributed.run --nnodes "$nodes" --nproc_per_node "$processes" "${meeting[@]}" "$file" --config-file "$config" "$@"
