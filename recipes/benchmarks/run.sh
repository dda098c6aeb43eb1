#!/usr/bin/env bash
# Sets up what is missing and times the fused ops against eager and torch.compile:
# bash recipes/benchmarks/run.sh [OP...] [--dtypes fp32 bf16 fp16] [--threads N] [--device cuda] [--no-compile] [--out FILE.json]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bash "$ROOT/recipes/setup_env.sh"
exec "$ROOT/.venv/bin/python" "$ROOT/recipes/benchmarks/run.py" "$@"
