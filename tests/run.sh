#!/usr/bin/env bash
# Sets up what is missing and runs the tests: bash tests/run.sh [--all] [pytest's arguments].
# By default the quick tests, on two workers; --all runs the slow ones too. With a path or -k it is the same set-up and
# then just that, paths counted from the repository's root: bash tests/run.sh tests/ops/test_adam.py -k tail
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$ROOT/recipes/setup_env.sh"

select=(-m "not slow")
if [ "${1:-}" = --all ]; then
  select=()
  shift
fi
# One thread for each worker: the tensors are small, and oversubscribed threads only wait for each other.
cd "$ROOT"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -n "${LS_TEST_WORKERS:-2}" --dist loadfile ${select[@]+"${select[@]}"} "$@"
