#!/usr/bin/env bash
# Sets up what is missing and times the fused ops against stock's: bash recipes/benchmarks/run.sh [OP...] [--threads N]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bash "$ROOT/recipes/setup_env.sh"
exec "$ROOT/.venv/bin/python" "$ROOT/recipes/benchmarks/run.py" "$@"
