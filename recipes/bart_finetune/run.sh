#!/usr/bin/env bash
# bash recipes/bart_finetune/run.sh (--help for the flags, README.md for the data and figures).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" bart_finetune "$@"
