#!/usr/bin/env bash
# bash recipes/wmt14_en_de/run.sh (--help for the flags, README.md for the data and figures).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" wmt14_en_de "$@"
