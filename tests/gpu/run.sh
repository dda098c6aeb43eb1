#!/usr/bin/env bash
# On a machine with a GPU: correctness of every op, then the op benchmarks on the GPU: bash tests/gpu/run.sh OUT
# Logs, JSON and pictures go to OUT; a short table is printed last. See README.md beside this file.
#
#   LS_PYTHON          the interpreter (default: .venv/bin/python, else python3)
#   LS_GPU_TEST_S      time limits, in seconds, of the tests (default 180)
#   LS_GPU_BENCH_S     and of the benchmarks (default 300)
#   LS_GPU_REHEARSAL   1: without a GPU, a few tests on the SIMT harness and a few benchmarks on the CPU, to try this script
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# = 1 ] || { echo "usage: bash tests/gpu/run.sh OUT" >&2; exit 2; }
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
cd "$ROOT" || exit 2

PYTHON=${LS_PYTHON:-}
if [ -z "$PYTHON" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
# The plugin comes from where it is installed with its library; the working directory must not come before that.
export PYTHONSAFEPATH=1 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$ROOT
REHEARSAL=${LS_GPU_REHEARSAL:-0}

die() { printf 'tests/gpu/run.sh: %s\n' "$1" >&2; exit 2; }

if [ "$REHEARSAL" = 1 ]; then
  tests=(-k "simt and (layer_norm or adam) and not compile")
  benchmarks=(layer_norm bias_dropout_residual --device cpu --shape "32 x" --seconds 0.1 --no-compile)
  first=(--dtypes bf16) second=(--dtypes fp32)
  export MALLOC_PERTURB_=128   # glibc fills what it hands out with 0x7f: 3e38 in fp32 and bf16, NaN in fp16
else
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$OUT/gpu.log" ||
    die "no GPU: torch.cuda.is_available() is false for $PYTHON (see $OUT/gpu.log); LS_GPU_REHEARSAL=1 tries the script without one"
  "$PYTHON" -W ignore - >"$OUT/library.log" 2>&1 <<'PYTHON' || die "$(tail -n 1 "$OUT/library.log"); build with LS_CUDA=1, see tests/gpu/README.md"
import sys
from ls_plugin import _library
status = _library.status()
print(status)
if not (status.loaded and status.cuda):
    sys.exit(f"the compiled library has no CUDA kernels: {status.reason or status.path}")
PYTHON
  tests=(-k cuda)
  benchmarks=(--device cuda --seconds 0.6)
  first=(--dtypes bf16) second=(--dtypes fp32 fp16 --no-compile)
fi

echo "== tests"
timeout --kill-after=10 "${LS_GPU_TEST_S:-180}" "$PYTHON" -m pytest tests/ops -q -p tests.gpu.poison "${tests[@]}" \
  --junitxml "$OUT/tests.xml" >"$OUT/tests.log" 2>&1
tests_status=$?
tail -n 3 "$OUT/tests.log"

# The dtype that matters most first; each case is on disk as soon as it is measured.
echo "== benchmarks"
begin=$SECONDS bench_status=0
for part in first second; do
  left=$((${LS_GPU_BENCH_S:-300} - (SECONDS - begin)))
  [ "$left" -gt 5 ] || { bench_status=124; break; }
  declare -n dtypes=$part
  timeout --kill-after=10 "$left" "$PYTHON" recipes/benchmarks/run.py "${benchmarks[@]}" "${dtypes[@]}" \
    --out "$OUT/benchmark_$part.json" >"$OUT/benchmark_$part.log" 2>&1
  status=$?
  [ "$status" = 0 ] || { bench_status=$status; tail -n 3 "$OUT/benchmark_$part.log"; }
done

"$PYTHON" tests/gpu/summary.py "$OUT"
summary_status=$?
for name in tests bench summary; do
  declare -n status=${name}_status
  case $status in
    0) ;;
    124 | 137) echo "$name: cut at the time limit" ;;
    *) echo "$name: failed with status $status, see $OUT" ;;
  esac
done
[ "$tests_status$bench_status$summary_status" = 000 ]
