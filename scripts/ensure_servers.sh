#!/usr/bin/env bash
# Makes sure that the programs of the servers are installed. It starts nothing: tests start private servers themselves.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive

has_postgres() {
    compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null ||
        [[ -n ${OUTRIDER_TEST_POSTGRES:-} ]]
}

has_rabbitmq() {
    command -v rabbitmq-server >/dev/null || [[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ]] ||
        [[ -n ${OUTRIDER_TEST_RABBITMQ:-} ]]
}

has_kafka() {
    # Kafka itself comes from the Maven repository, once, when the first test asks for it.
    { command -v java >/dev/null && command -v mvn >/dev/null; } || [[ -n ${OUTRIDER_TEST_KAFKA:-} ]]
}

# Usage: need_apt NAME VARIABLE PACKAGE. Ends here if the packages cannot be installed by us.
need_apt() {
    [[ $(id -u) -eq 0 ]] && command -v apt-get >/dev/null && return
    echo "$1 is missing. Install its server programs (Debian: apt-get install $3)," >&2
    echo "or set $2 to the URL of a server that tests may use." >&2
    exit 1
}

install_postgres() {
    need_apt PostgreSQL OUTRIDER_TEST_POSTGRES postgresql-15
    # The package would otherwise create and start a system-wide cluster that nobody asked for.
    local config=/etc/postgresql-common/createcluster.conf
    if [[ ! -e $config ]]; then
        mkdir -p "$(dirname "$config")"
        echo 'create_main_cluster = false' >"$config"
    fi
    apt-get update -qq
    # Dpkg keeps our file when the package brings its own.
    apt-get install -y -qq --no-install-recommends -o Dpkg::Options::=--force-confold \
        postgresql-15 postgresql-client-15 >/dev/null
}

install_rabbitmq() {
    need_apt RabbitMQ OUTRIDER_TEST_RABBITMQ rabbitmq-server
    # The package would otherwise start a system-wide broker. Debian asks this file whether services may start.
    local policy=/usr/sbin/policy-rc.d
    if [[ ! -e $policy ]]; then
        trap "rm -f $policy" EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy"
        chmod 755 "$policy"
    fi
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends rabbitmq-server >/dev/null
}

install_kafka() {
    need_apt 'Java 17 or Maven' OUTRIDER_TEST_KAFKA 'openjdk-17-jre-headless maven'
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless maven >/dev/null
}

has_postgres || install_postgres
has_rabbitmq || install_rabbitmq
has_kafka || install_kafka
