#!/usr/bin/env bash
# On a machine with a GPU: correctness of every op, the op benchmarks, then whole trainings beside stock: bash tests/gpu/run.sh OUT
# Logs, JSON and reports go to OUT; a short table is printed last. See README.md beside this file.
#
#   LS_PYTHON          the interpreter (default: .venv/bin/python, else python3)
#   LS_GPU_TOTAL_S     time limit of everything, in seconds (default 430; a training that is stopped may take another 60); what is last in the order is left out first
#   LS_GPU_TEST_S      and of the tests alone (default 170)
#   LS_GPU_BENCH_S     of the op benchmarks without torch.compile (default 100)
#   LS_GPU_TEST_JOBS   test files at a time (default 4)
#   LS_GPU_REHEARSAL   1: without a GPU, a few tests on the SIMT harness, a few benchmarks and tiny trainings on the CPU, to try this script
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# = 1 ] || { echo "usage: bash tests/gpu/run.sh OUT" >&2; exit 2; }
mkdir -p "$1" && OUT=$(cd "$1" && pwd) || exit 2
cd "$ROOT" || exit 2
rm -rf "$OUT"/tests_*.{xml,log} "$OUT"/benchmark_* "$OUT"/training_*  # of an earlier run: they would be read as this one's

PYTHON=${LS_PYTHON:-}
if [ -z "$PYTHON" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
# The plugin comes from where it is installed with its library; the working directory must not come before that.
export PYTHONSAFEPATH=1 PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$ROOT
REHEARSAL=${LS_GPU_REHEARSAL:-0}

die() { printf 'tests/gpu/run.sh: %s\n' "$1" >&2; exit 2; }

if [ "$REHEARSAL" = 1 ]; then
  files=(tests/ops/test_layer_norm.py tests/ops/test_adam.py) tests=(-k simt)
  benchmarks=(--ops layer_norm bias_dropout_residual --device cpu --shape "32 x" --seconds 0.1)
  first=(--dtypes bf16 --no-compile) second=(--dtypes fp32 --no-compile) third=()
  model=(--arch transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64)
  model+=(--decoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-attention-heads 2 --dict-size 1000 --cpu)
  points=(fp32:64 fp32:128) needed=2 updates=4 warm_up=2
  : "${LS_GPU_TEST_S:=600}" "${LS_GPU_TOTAL_S:=900}"  # the harness may have to be built
  export MALLOC_PERTURB_=128   # glibc fills what it hands out with 0x7f: 3e38 in fp32 and bf16, NaN in fp16
else
  "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>"$OUT/gpu.log" ||
    die "no GPU: torch.cuda.is_available() is false for $PYTHON (see $OUT/gpu.log); LS_GPU_REHEARSAL=1 tries the script without one"
  "$PYTHON" -W ignore - >"$OUT/library.log" 2>&1 <<'PYTHON' || die "$(tail -n 1 "$OUT/library.log"); build with LS_CUDA=1, see tests/gpu/README.md"
import sys
import fairseq  # tests and benchmarks compare with it
import torch
from ls_plugin import _library
status = _library.status()
print(status)
if not (status.loaded and status.cuda):
    sys.exit(f"the compiled library has no CUDA kernels: {status.reason or status.path}")
if not _library.has_kernel(torch.empty(0, device="cuda")):
    sys.exit(f"the compiled library has no kernels for {torch.cuda.get_device_name()}, only for {status.archs}")
PYTHON
  files=(tests/ops/test_*.py) tests=(-k cuda)
  benchmarks=(--device cuda --seconds 0.6)
  first=(--dtypes bf16 --no-compile) second=(--dtypes fp32 fp16 --no-compile) third=(--dtypes bf16)
  # The paper's model; the goals are those of fp16.
  model=(--arch transformer_wmt_en_de_big_t2t --dict-size 32000)
  points=(fp16:512 fp16:4096 fp16:8192 bf16:512 bf16:4096 bf16:8192 fp16:1024 fp16:2048 bf16:1024 bf16:2048)
  needed=3 updates=16 warm_up=6
  export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}  # one GPU, where there are several
fi
end=$((SECONDS + ${LS_GPU_TOTAL_S:-430}))

# A process for each file: what ends a CUDA context (a fault, a trap) then fails the rest of one op's tests and not of all. SIGINT
# lets pytest write its record of what it has done.
test_file() {
  local name left=$(($1 - SECONDS))
  name=$(basename "$2" .py)
  [ "$left" -gt 0 ] || { echo "not started: no time left" >"$OUT/tests_$name.log"; return 124; }
  OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} timeout --signal=INT --kill-after=10 "$left" "$PYTHON" -m pytest "$2" -q -p tests.gpu.poison "${tests[@]}" \
    --junitxml "$OUT/tests_$name.xml" >"$OUT/tests_$name.log" 2>&1
  local status=$?
  [ "$status" != 5 ] || status=0  # none of its tests is for a GPU
  [ "$status" = 0 ] || echo "$name: $(tail -n 1 "$OUT/tests_$name.log")"
  return "$status"
}

echo "== tests"
deadline=$((SECONDS + ${LS_GPU_TEST_S:-170})) tests_status=0 running=0
for file in "${files[@]}"; do
  if [ "$running" -ge "${LS_GPU_TEST_JOBS:-4}" ]; then
    wait -n || { status=$?; [ "$tests_status" != 0 ] || tests_status=$status; }
    running=$((running - 1))
  fi
  test_file "$deadline" "$file" &
  running=$((running + 1))
done
while [ "$running" -gt 0 ]; do
  wait -n || { status=$?; [ "$tests_status" != 0 ] || tests_status=$status; }
  running=$((running - 1))
done

# benchmark PART SECONDS: each case is on disk as soon as it is measured.
benchmark() {
  declare -n options=$1
  [ "${#options[@]}" -gt 0 ] || return 0
  [ "$2" -gt 5 ] || return 124
  timeout --kill-after=10 "$2" "$PYTHON" -m ls_plugin.cli.report kernels "${benchmarks[@]}" "${options[@]}" \
    --out "$OUT/benchmark_$1" >"$OUT/benchmark_$1.log" 2>&1
  local status=$?
  [ "$status" = 0 ] || tail -n 3 "$OUT/benchmark_$1.log"
  return "$status"
}

# train PRECISION TOKENS SECONDS: stock and ls in turn. Sentences that fairseq makes up, all alike, so no data are needed; the learning rate is so
# low that the losses stay comparable.
train() {
  [ "$3" -gt 20 ] || return 124
  local name=training_$1_$2 precision=()
  [ "$1" = fp32 ] || precision=("--$1")
  timeout --signal=INT --kill-after=65 "$3" "$PYTHON" -m ls_plugin.cli.report run --out "$OUT/$name" --name "$1, $2 tokens" --contenders stock,ls \
    --rounds 1 --warm-up "$warm_up" --updates "$updates" -- "${model[@]}" "${precision[@]}" --task dummy_mt --share-all-embeddings \
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1 --optimizer adam --adam-betas '(0.9, 0.98)' --lr 1e-5 --clip-norm 1.0 \
    --max-tokens "$2" >"$OUT/$name.log" 2>&1
  local status=$?
  [ "$status" = 0 ] || echo "$name: $(tail -n 1 "$OUT/$name.log")"
  return "$status"
}

# Eager of every op first, the dtype that matters most before the others; then trainings; torch.compile of the ops, which takes seconds for each
# case, in what time is left.
echo "== benchmarks"
begin=$SECONDS bench_status=0
for part in first second; do
  benchmark "$part" $((${LS_GPU_BENCH_S:-100} - (SECONDS - begin))) || { bench_status=$?; break; }
done
echo "== trainings"
train_status=0 n_trained=0
for point in "${points[@]}"; do
  train "${point%:*}" "${point#*:}" $((end - SECONDS))
  status=$?
  if [ "$status" = 0 ]; then n_trained=$((n_trained + 1))
  elif [ "$train_status" = 0 ] || [ "$train_status" = 124 ]; then train_status=$status; fi  # what failed stays, whatever is cut later
done
[ "$train_status" != 124 ] || [ "$n_trained" -lt "$needed" ] || train_status=0  # the first ones are what must fit
benchmark third $((end - SECONDS)) || [ $? = 124 ] || bench_status=1

"$PYTHON" tests/gpu/summary.py "$OUT"
summary_status=$?
for name in tests bench train summary; do
  declare -n result=${name}_status
  case $result in
    0) ;;
    124 | 137) echo "$name: cut at the time limit" ;;
    *) echo "$name: failed with status $result, see $OUT" ;;
  esac
done
[ "$tests_status$bench_status$train_status$summary_status" = 0000 ]
