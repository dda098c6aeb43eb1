#!/usr/bin/env bash
# bash recipes/language_model/run.sh (--help for the flags, README.md for the data and figures).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" language_model "$@"
