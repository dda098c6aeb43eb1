#!/usr/bin/env bash
# bash recipes/iwslt14_de_en/run.sh (--help for the flags, README.md for the data and figures).
exec bash "$(dirname "${BASH_SOURCE[0]}")/../common/start.sh" iwslt14_de_en "$@"
