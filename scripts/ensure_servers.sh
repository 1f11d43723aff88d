#!/usr/bin/env bash
# Makes sure that the programs of the servers are installed. It starts nothing: tests start private servers themselves.
# What cannot be installed is said, and tests that need it are skipped; with OUTRIDER_REQUIRE_SERVICES=1 it ends here.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

has_postgres() {
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null
}

has_pgbouncer() {
    command -v pgbouncer >/dev/null || [[ -x /usr/sbin/pgbouncer ]]
}

has_rabbitmq() {
    command -v rabbitmq-server >/dev/null || [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]]
}

has_kafka() {
    # Kafka itself comes from the Maven repository, once.
    command -v java >/dev/null && command -v mvn >/dev/null
}

has_mongo() {
    # MongoDB itself comes out of a wheel, once. The wheel lacks one library that few systems have from the start.
    command -v mongod >/dev/null || /sbin/ldconfig -p | grep 'libcurl\.so\.4 ' >/dev/null
}

missing() {
    echo "$1 is missing. Install it (Debian: apt-get install $3)," >&2
    echo "or set $2 to the URL of a server that tests may use." >&2
    [[ ${OUTRIDER_REQUIRE_SERVICES:-0} == 0 ]] || exit 1
}

# Packages would start system-wide services that nobody asked for. Debian asks the first file whether they may, and
# PostgreSQL's package asks the second one whether to make a cluster; dpkg keeps ours when the package brings its own.
forbid_services() {
    local policy=/usr/sbin/policy-rc.d clusters=/etc/postgresql-common/createcluster.conf
    if [[ ! -e $policy ]]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    if [[ ! -e $clusters ]]; then
        mkdir -p "$(dirname "$clusters")"
        echo 'create_main_cluster = false' >"$clusters"
    fi
}

install() {
    if [[ $(id -u) -ne 0 ]] || ! command -v apt-get >/dev/null; then
        return 1
    fi
    echo "Installing $* ..." >&2
    forbid_services
    apt-get update -qq &&
        apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold "$@" >/dev/null
}

# Usage: ensure KIND NAME VARIABLE PACKAGE...
ensure() {
    local kind=$1 name=$2 variable=$3
    shift 3
    [[ -n ${!variable:-} ]] || "has_$kind" || install "$@" || missing "$name" "$variable" "$*"
}

ensure postgres PostgreSQL OUTRIDER_TEST_POSTGRES postgresql-15 postgresql-client-15
ensure pgbouncer PgBouncer OUTRIDER_TEST_PGBOUNCER pgbouncer
ensure rabbitmq RabbitMQ OUTRIDER_TEST_RABBITMQ rabbitmq-server
ensure kafka 'Java or Maven, for Kafka,' OUTRIDER_TEST_KAFKA openjdk-17-jre-headless maven
ensure mongo 'A library of MongoDB' OUTRIDER_TEST_MONGO libcurl4
