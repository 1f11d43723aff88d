#!/usr/bin/env bash
# Creates .venv. Debian ships python3 without ensurepip, so root gets python3-venv installed on the way.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}

if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "Python's venv module is missing. Install it (Debian: apt-get install python3-venv), then run make again." >&2
        exit 1
    fi
    echo "Installing python3-venv ..." >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
fi

rm -rf .venv
"$python" -m venv .venv
