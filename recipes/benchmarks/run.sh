#!/usr/bin/env bash
# Sets up what is missing and times the fused ops: bash recipes/benchmarks/run.sh --out DIR [FLAGS OF lightseq-report kernels]
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bash "$ROOT/recipes/setup_env.sh"
exec "$ROOT/.venv/bin/python" -m ls_plugin.cli.report kernels "$@"
