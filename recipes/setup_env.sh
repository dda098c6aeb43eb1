#!/usr/bin/env bash
# Makes .venv at the repository root, installs the pinned packages of constraints.txt, fairseq and this project, and
# builds the compiled library. Nothing outside the repository is written; nobody has to activate anything, since the
# recipes call .venv/bin/... by path.
#
#   bash recipes/setup_env.sh            first run: minutes (fairseq is built from source); then about a second
#   LS_PYTHON=python3.12 bash ...        another interpreter (3.10 to 3.12)
#   LS_TORCH=cpu|cuda bash ...           which build of torch; default: cuda where an NVIDIA GPU is seen, else cpu
#   LS_CUDA, LS_CUDA_ARCH, LS_BUILD      how setup.py builds the library, see ls_plugin/README.md
#
# It redoes only what changed: a key over all inputs is kept in .venv for the packages and another for the library.
# A run that was killed leaves a mark, and the next one then starts .venv afresh. Parallel runs wait for each other.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV=$ROOT/.venv
VENV_PYTHON=$VENV/bin/python
CONSTRAINTS=$ROOT/recipes/constraints.txt
LOG=$VENV/setup.log
UNFINISHED=$VENV/.ls_unfinished
TORCH=2.13.0        # the same pin as in constraints.txt; the build (cpu or cuda) is chosen below
PIP=24.0            # the last pip that accepts the metadata of omegaconf 2.0, which fairseq 0.12.2 (Python 3.10) needs
DISK_MIB_CPU=3000   # .venv takes 1.4 GiB with torch's CPU build; the rest is for unpacking and building
DISK_MIB_CUDA=12000
HEARTBEAT_S=30

say() { printf '[setup %4d s] %s\n' "$SECONDS" "$*" >&2; }

# die WHAT [REMEDY...]: one line that says what is wrong, then one line for each way to fix it.
die() {
  printf '\nsetup_env: %s\n' "$1" >&2
  shift
  local remedy
  for remedy in "$@"; do printf '  -> %s\n' "$remedy" >&2; done
  exit 1
}

# install_hint DEBIAN_PACKAGE FEDORA_PACKAGE: the command that installs a system package here.
install_hint() {
  local sudo=
  [ "$(id -u)" = 0 ] || sudo='sudo '
  if command -v apt-get >/dev/null; then echo "${sudo}apt-get update && ${sudo}apt-get install -y $1"
  elif command -v dnf >/dev/null; then echo "${sudo}dnf install -y $2"
  elif command -v brew >/dev/null; then echo "brew install ${2%-devel}"
  else echo "install the package $1 (Debian's name; Fedora: $2)"
  fi
}

supported() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

# A candidate must run, not just exist: pyenv leaves a python3.10 on the PATH that only prints an error.
choose_python() {
  local candidate found=
  if [ -n "${LS_PYTHON:-}" ]; then
    supported "$LS_PYTHON" && { command -v "$LS_PYTHON"; return; }
    found=$("$LS_PYTHON" --version 2>&1 | tail -n 1) || true
    die "LS_PYTHON=$LS_PYTHON must be Python 3.10, 3.11 or 3.12, got: ${found:-nothing that runs}" \
        "point LS_PYTHON to such a Python, or unset it"
  fi
  for candidate in python3.11 python3.12 python3.10 python3 python; do
    if supported "$candidate"; then command -v "$candidate"; return; fi
    [ -n "$found" ] || found=$("$candidate" --version 2>/dev/null) || true
  done
  die "Python 3.10, 3.11 or 3.12 is needed, found: ${found:-no Python at all}" \
      "$(install_hint 'python3.11 python3.11-venv python3.11-dev' 'python3.11 python3.11-devel')" \
      "or name one that is elsewhere: LS_PYTHON=/path/to/python3.11 bash recipes/setup_env.sh"
}

BEAT=
stop_heartbeat() {
  [ -n "$BEAT" ] || return 0
  kill "$BEAT" 2>/dev/null || true
  wait "$BEAT" 2>/dev/null || true
  BEAT=
}

# last_line: how far the step is, by the last line of the log, cut to a terminal's width: [37/48, 52.1 s] c++ kernels/…
last_line() {
  local line
  line=$(tail -n 1 "$LOG")
  line=${line//"$ROOT/"/}
  printf '%s' "${line:0:80}"
}

# step LABEL COMMAND...: runs it with its output in the log; while it runs, says every half minute how far it is; when it
# fails, shows the end of the log and fails.
step() {
  local label=$1 status=0
  shift
  say "$label"
  printf '\n==== %s\n' "$*" >>"$LOG"
  ( while sleep "$HEARTBEAT_S" >/dev/null 2>&1; do say "  still at it: $(last_line)"; done ) 9>&- &
  BEAT=$!
  "$@" >>"$LOG" 2>&1 || status=$?
  stop_heartbeat
  [ "$status" = 0 ] && return
  tail -n 25 "$LOG" | sed 's/^/    | /' >&2
  return "$status"
}

# pip_step LABEL ARGUMENTS...: pip install with the pins. The mark is there exactly while pip writes into .venv.
pip_step() {
  local label=$1
  shift
  touch "$UNFINISHED"
  if ! step "$label" "$VENV_PYTHON" -m pip install --disable-pip-version-check --no-input --progress-bar off \
       --constraint "$CONSTRAINTS" "$@"; then
    rm -f "$UNFINISHED"   # pip failed by itself, and then leaves whole packages behind
    if grep -q 'No space left on device' <(tail -n 40 "$LOG"); then
      die "the disk is full" "free some space (df -h $ROOT), then run this again: it goes on from here"
    fi
    die "'$label' failed; the whole log is $LOG" "fix what it names (network, index, disk), then run this again: it goes on from here"
  fi
  rm -f "$UNFINISHED"
}

has_gpu() { [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; }

install_torch() {
  if "$VENV_PYTHON" -c "import importlib.metadata as m, sys
version, _, build = m.version('torch').partition('+')
sys.exit(version != '$TORCH' or ('$FLAVOUR' == 'cuda' and build == 'cpu'))" 2>/dev/null; then
    return
  fi
  if [ "$FLAVOUR" = cuda ]; then
    # === compares the text, so a +cpu build that pip's indexes may also offer does not win.
    pip_step "installing torch $TORCH, CUDA build (several GB)" "torch===$TORCH"
  elif [ "$(uname -s)" = Darwin ]; then
    pip_step "installing torch $TORCH" "torch==$TORCH"
  elif "$VENV_PYTHON" -m pip download --disable-pip-version-check --no-input --progress-bar off --quiet --no-deps \
       --dest "$VENV/torch" "torch==$TORCH+cpu" >>"$LOG" 2>&1; then
    pip_step "installing torch $TORCH, CPU build" "$VENV"/torch/torch-*.whl
    rm -rf "$VENV/torch"
  else
    # The plain torch of the default index carries CUDA: gigabytes that a machine without a GPU cannot use.
    die "no GPU is seen, and pip's configured indexes have no CPU build of torch $TORCH for $("$VENV_PYTHON" --version)" \
        "give pip PyTorch's CPU index (the address that PyTorch's 'Get Started' page shows for Pip and CPU): PIP_EXTRA_INDEX_URL=ADDRESS bash recipes/setup_env.sh" \
        "or take the default build and its several GB of CUDA libraries: LS_TORCH=cuda bash recipes/setup_env.sh"
  fi
}

# fairseq comes as source only and holds Cython and C++ that its data loading needs. CUDA_HOME is unset because with
# it fairseq's setup asks for CUDA sources that its sdist lacks; build isolation would fetch a second torch.
install_fairseq() {
  local requirement
  if "$VENV_PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then requirement=fairseq-fixed==0.12.3.1
  else requirement=fairseq==0.12.2; fi
  "$VENV_PYTHON" -c "import importlib.metadata as m; assert m.version('${requirement%%==*}') == '${requirement##*==}'" \
      2>/dev/null && return
  local cuda_home=${CUDA_HOME:-}
  unset CUDA_HOME
  if [ -z "$COMPILER" ]; then
    # A C++ compiler that pip can install, used for this one build and removed again.
    pip_step "installing a stand-in compiler for fairseq's sources (no C++ compiler on this machine)" ziglang
    printf '#!/bin/sh\nexec "%s" -m ziglang cc "$@"\n' "$VENV_PYTHON" >"$VENV/bin/ls-cc"
    printf '#!/bin/sh\nexec "%s" -m ziglang c++ "$@"\n' "$VENV_PYTHON" >"$VENV/bin/ls-c++"
    chmod +x "$VENV/bin/ls-cc" "$VENV/bin/ls-c++"
    export CC="$VENV/bin/ls-cc" CXX="$VENV/bin/ls-c++" LDSHARED="$VENV/bin/ls-c++ -shared"
  fi
  pip_step "installing $requirement, built from source (about 3 minutes the first time)" --no-build-isolation "$requirement"
  if [ -z "$COMPILER" ]; then
    unset CC CXX LDSHARED
    rm -f "$VENV/bin/ls-cc" "$VENV/bin/ls-c++"
    step "removing the stand-in compiler" "$VENV_PYTHON" -m pip uninstall --yes ziglang
  fi
  [ -z "$cuda_home" ] || export CUDA_HOME=$cuda_home
}

# fairseq looks for --user-dir ls_plugin in the working directory and then in site-packages, where an editable install has no such
# entry. An empty file of that name ends its search, and the import, which takes no notice of it, finds the clone. A link to the
# clone would not do: a later pip install or uninstall would write and delete through it. As a line of RECORD the file goes
# with the installation that it belongs to.
MARKER=
mark_for_fairseq() {
  local record
  [ ! -e "$MARKER" ] || return 0
  rm -f "$MARKER"   # a link to a clone that was moved
  : >"$MARKER"
  for record in "${MARKER%/*}"/ls_plugin-*.dist-info/RECORD; do
    grep -qx 'ls_plugin,,' "$record" || echo 'ls_plugin,,' >>"$record"
  done
}

# ---- one run at a time: the lock lies on this very file, so that no lock file is left about
exec 9<"${BASH_SOURCE[0]}"
cd "$ROOT"
if command -v flock >/dev/null && ! flock -n 9; then
  say "another set-up is running here; waiting for it"
  flock 9
fi
trap 'printf "\nsetup_env: interrupted; run it again and it repairs what was cut short\n" >&2; exit 130' INT TERM
trap stop_heartbeat EXIT

# ---- what is here
[ -w "$ROOT" ] || die "$ROOT is not writable for $(id -un)" "clone the repository to a place of your own"
if [ -z "${LS_PYTHON:-}" ] && [ -x "$VENV_PYTHON" ] && supported "$VENV_PYTHON"; then PYTHON=$VENV_PYTHON
else PYTHON=$(choose_python); fi
VERSION=$("$PYTHON" -c 'import platform; print(platform.python_version())')

FLAVOUR=${LS_TORCH:-$(has_gpu && echo cuda || echo cpu)}
case $FLAVOUR in cpu | cuda) ;; *) die "LS_TORCH must be cpu or cuda, got $FLAVOUR" ;; esac

COMPILER=
for candidate in "${CXX:-c++}" g++ clang++; do
  if [ -z "$COMPILER" ] && command -v "${candidate%% *}" >/dev/null; then COMPILER=$candidate; fi
done
HEADERS=$("$PYTHON" -c 'import os, sysconfig; print(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))')
[ "$HEADERS" = True ] || die "Python $VERSION lacks its headers (Python.h), which fairseq's sources need" \
  "$(install_hint "python${VERSION%.*}-dev" "python${VERSION%.*}-devel")"

if [ -z "$COMPILER" ] && [ "${LS_BUILD:-}" = 1 ]; then
  die "LS_BUILD=1 needs a C++ compiler, found none" "$(install_hint g++ gcc-c++)" "or unset LS_BUILD to go on without the kernels"
fi
MARKER=$VENV/lib/python${VERSION%.*}/site-packages/ls_plugin

# ---- the keys over all inputs
sha() { sha256sum 2>/dev/null || shasum -a 256; }
PACKAGES_KEY=$({ echo "$ROOT $VERSION $FLAVOUR ${COMPILER:+compiler}"
                 cat "$CONSTRAINTS" pyproject.toml recipes/setup_env.sh; } | sha)
LIBRARY_KEY=$({ echo "$FLAVOUR ${LS_CUDA:-} ${LS_CUDA_ARCH:-} ${LS_BUILD:-}"
                nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true   # it decides what nvcc builds for
                if [ -n "$COMPILER" ]; then $COMPILER --version; fi
                "${CUDA_HOME:+$CUDA_HOME/bin/}nvcc" --version 2>/dev/null || true
                find kernels -type f | LC_ALL=C sort | tr '\n' '\0' | xargs -0 cat setup.py; } | sha)

packages_done() { [ ! -e "$UNFINISHED" ] && [ -e "$MARKER" ] && [ "$(cat "$VENV/.ls_packages" 2>/dev/null)" = "$PACKAGES_KEY" ]; }
library_done() {
  [ "$(cat "$VENV/.ls_library" 2>/dev/null)" = "$LIBRARY_KEY" ] || return 1
  local library
  library=$(cat "$VENV/.ls_library_path" 2>/dev/null)
  [ -z "$library" ] || [ -e "$library" ]
}
if packages_done && library_done; then
  say "up to date (Python $VERSION)"
  exit 0
fi

# ---- .venv
usable_venv() {
  [ ! -e "$UNFINISHED" ] && [ -x "$VENV_PYTHON" ] &&
    [ "$("$VENV_PYTHON" -c 'import pip, sys, platform; print(sys.prefix, platform.python_version())' 2>/dev/null)" = "$VENV $VERSION" ]
}
VENV_IS_NEW=0
if ! usable_venv; then
  VENV_IS_NEW=1
  [ "$PYTHON" != "$VENV_PYTHON" ] || PYTHON=$(choose_python)
  [ ! -e "$VENV" ] || say "starting .venv afresh: it is unfinished, was moved, or belongs to another Python"
  "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
    die "Python $VERSION lacks its venv module" "$(install_hint "python${VERSION%.*}-venv" python3-pip)"
  free_mib=$(df -Pk "$ROOT" | awk 'NR == 2 { print int($4 / 1024) }')
  need_mib=$DISK_MIB_CPU
  [ "$FLAVOUR" = cpu ] || need_mib=$DISK_MIB_CUDA
  [ "$free_mib" -ge "$need_mib" ] ||
    die "$need_mib MiB of free disk are needed at $ROOT, got $free_mib MiB" "free some space, or clone to another disk"
  say "making .venv with $("$PYTHON" --version)"
  "$PYTHON" -m venv --clear "$VENV" || die "making $VENV failed" "$(install_hint "python${VERSION%.*}-venv" python3-pip)"
fi

# ---- packages, and the project itself: editable, so that the scripts run the sources of this clone
if [ "$VENV_IS_NEW" = 1 ] || ! packages_done; then
  rm -f "$VENV/.ls_packages" "$VENV/.ls_library"
  : >"$LOG"
  if ! "$VENV_PYTHON" -c "import importlib.metadata as m; assert m.version('pip') == '$PIP'" 2>/dev/null; then
    pip_step "installing pip $PIP" "pip==$PIP"
  fi
  pip_step "installing the build tools" setuptools wheel ninja cython numpy
  install_torch
  install_fairseq
  # DeepSpeed comes as source too; DS_BUILD_OPS=0 leaves its own kernels out, which nothing here uses.
  LS_BUILD=0 DS_BUILD_OPS=0 pip_step "installing ls_plugin and what it needs" --no-build-isolation --editable "$ROOT[dev]"
  mark_for_fairseq
  echo "$PACKAGES_KEY" >"$VENV/.ls_packages"
fi

# ---- the compiled library: by setup.py itself, since pip would build in a fresh folder and so compile everything each time
if [ -z "$COMPILER" ]; then
  say "warning: no C++ compiler, so the compiled kernels are left out: everything runs on plain PyTorch, no faster than"
  say "         stock fairseq. To have them: $(install_hint g++ gcc-c++), then run this again"
fi
label="building the kernels with $COMPILER"
[ "${LS_BUILD:-}" != 0 ] || label="leaving the kernels out (LS_BUILD=0)"   # setup.py then removes those of an earlier run
rm -f "$VENV/.ls_library"
[ -z "$COMPILER" ] || step "$label" "$VENV_PYTHON" setup.py build_ext --inplace ||
  die "building the kernels failed; the whole log is $LOG" "LS_BUILD=0 bash recipes/setup_env.sh goes on without them"

say "checking"
STATUS=$(cd / && "$VENV_PYTHON" -W ignore - 2>>"$LOG" <<'PYTHON'
import importlib.metadata as metadata

import torch

import ls_plugin
from ls_plugin import _library

status = _library.status()
fairseq = next(
    f"{name} {metadata.version(name)}"
    for name in ("fairseq-fixed", "fairseq")
    if any(d.metadata["Name"] == name for d in metadata.distributions())
)
kernels = f"compiled kernels: {status.isa}{' and CUDA' if status.cuda else ''}" if status.loaded else f"no compiled kernels: {status.reason}"
print(status.path if status.loaded else "")
print(f"torch {torch.__version__}, {fairseq}, {kernels}")
PYTHON
) || {
  tail -n 12 "$LOG" | sed 's/^/    | /' >&2
  die "the installed packages do not load" "$VENV_PYTHON ls_plugin/cli/doctor.py says more; rm -r .venv starts over"
}
head -n 1 <<<"$STATUS" >"$VENV/.ls_library_path"
echo "$LIBRARY_KEY" >"$VENV/.ls_library"
say "ready: Python $VERSION, $(tail -n 1 <<<"${STATUS%%;*}")"
