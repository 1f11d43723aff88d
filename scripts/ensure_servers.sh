#!/usr/bin/env bash
# Makes sure that the PostgreSQL programs are installed. It starts nothing: tests start private servers themselves.
set -euo pipefail

compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null && exit 0
command -v postgres >/dev/null && exit 0
[[ -n ${OUTRIDER_TEST_POSTGRES:-} ]] && exit 0

if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
    echo "PostgreSQL is missing. Install its server programs (Debian: apt-get install postgresql-15)," >&2
    echo "or set OUTRIDER_TEST_POSTGRES to the URL of a server that tests may use." >&2
    exit 1
fi

# The package would otherwise create and start a system-wide cluster that nobody asked for.
config=/etc/postgresql-common/createcluster.conf
if [[ ! -e $config ]]; then
    mkdir -p "$(dirname "$config")"
    echo 'create_main_cluster = false' >"$config"
fi

export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# Dpkg keeps our file when the package brings its own.
apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold \
    postgresql-15 postgresql-client-15 >/dev/null
