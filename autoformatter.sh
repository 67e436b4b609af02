#!/usr/bin/env bash
# Formats, lints and type-checks the tree. With --check nothing is written: that is the lint job.
# PYTHON chooses the interpreter whose ruff and mypy run; `make lint` passes the one of .venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python="${PYTHON:-python3}"
paths=(megatron tests docs)
[ -d examples ] && paths+=(examples)

case "${1:-}" in
  --check)
    "$python" -m ruff format --check "${paths[@]}"
    "$python" -m ruff check "${paths[@]}"
    ;;
  "")
    "$python" -m ruff check --fix "${paths[@]}"
    "$python" -m ruff format "${paths[@]}"
    ;;
  *)
    echo "autoformatter.sh: unknown argument '$1': it takes --check or nothing." >&2
    exit 2
    ;;
esac
"$python" -m mypy
