#!/usr/bin/env bash
# bash recipes/multi_gpu/run.sh (--help for the flags, README.md for the data and figures).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" multi_gpu "$@"
