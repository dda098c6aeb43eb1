#!/usr/bin/env bash
# Sets up what is missing and starts a recipe: bash recipes/common/start.sh NAME [FLAGS]. Each recipe's run.sh calls it.
set -euo pipefail
RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
NAME=$1
shift
for argument; do
  case $argument in
    --) break ;;
    -h | --help)   # needs nothing but some Python, so that it can be read before anything is installed
      for python in "$RECIPES/../.venv/bin/python" python3 python; do
        command -v "$python" >/dev/null && exec "$python" "$RECIPES/$NAME/recipe.py" --help
      done ;;
  esac
done
bash "$RECIPES/setup_env.sh"
exec "$RECIPES/../.venv/bin/python" "$RECIPES/$NAME/recipe.py" "$@"
