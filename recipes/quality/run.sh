#!/usr/bin/env bash
# Sets up what is missing, trains stock and ls for the same epochs, and compares what they translate:
# bash recipes/quality/run.sh [--epochs N] [--sentences N] [--threads N] [--layers N] [--width N] [--out DIR] [--continue] (--help for the rest)
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
bash "$HERE/../setup_env.sh"
exec "$HERE/../../.venv/bin/python" "$HERE/compare.py" "$@"
