#!/usr/bin/env bash
# Trains the preset tiny-glm5 on the source of this Python's standard library, and beside it the same model with a
# frozen indexer, for comparison. Each of the two runs has one thread, so together they fill two cores.
#
#   bash examples/tiny_glm5/train.sh [flags of pretrain_gpt, which win over those below]
#
# Everything lands in runs/ (RUNS_DIR): the data in runs/data (made once), the runs in a new directory of their own.
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${PYTHON:-python}
runs=${RUNS_DIR:-runs}
data=$runs/data/stdlib
out=$runs/tiny_glm5-$(date +%Y%m%d-%H%M%S)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if [ ! -e "${data}_valid_text_document.idx" ]; then
  mkdir -p "$(dirname "$data")"
  "$python" -m megatron.training.preprocess_data --input stdlib --append-eod --output-prefix "$data"
fi

flags=(
  --preset tiny-glm5
  --train-data-path "${data}_train_text_document"
  --valid-data-path "${data}_valid_text_document"
  --seq-length 256 --micro-batch-size 8 --train-iters 400
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 40
  --eval-interval 100 --eval-iters 4 --log-interval 20 --dsa-log-mass-interval 20
)

mkdir -p "$out/frozen_indexer"
"$python" -m megatron.training.pretrain_gpt "${flags[@]}" "$@" --log-dir "$out/frozen_indexer" \
  --dsa-indexer-loss-coeff 0 2> "$out/frozen_indexer/log.txt" &
frozen=$!
trap 'kill "$frozen" 2> /dev/null || true' EXIT

"$python" -m megatron.training.pretrain_gpt "${flags[@]}" --save "$out" --save-interval 100 \
  --tensorboard-dir "$out/tensorboard" "$@"
[ -e "$out/summary.json" ] || exit 1 # stopped before its end, and has said why

echo "Waiting for the run with a frozen indexer ($out/frozen_indexer)."
wait "$frozen" || { cat "$out/frozen_indexer/log.txt"; exit 1; }
trap - EXIT
"$python" examples/tiny_glm5/compare.py "$out"
