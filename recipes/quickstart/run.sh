#!/usr/bin/env bash
# From a clone to a trained translation model: bash recipes/quickstart/run.sh [--minutes M] (--help for the rest).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$HERE/../setup_env.sh"
exec "$HERE/../../.venv/bin/python" "$HERE/run.py" "$@"
