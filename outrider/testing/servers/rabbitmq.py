"""A throw-away RabbitMQ.

The node, its name service and its command-line tool share a port and a cookie that nobody else on the machine knows,
so it can run beside any other Erlang system.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from urllib.parse import quote

from outrider.testing.servers.server import (
    POLL_SECONDS,
    START_SECONDS_MAX,
    Server,
    ServerError,
    ServerMissing,
    free_port,
    given_or,
    listening,
)

VARIABLE = "OUTRIDER_TEST_RABBITMQ"
CTL_SECONDS_MAX = 60.0
PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"
METHOD_FRAME = b"\x01"
MEMORY_SHARE = "0.4"
"""How much of the machine's memory the server may use before it blocks publishers: its own default."""


class RabbitServer(Server):
    """One RabbitMQ node with the user guest and quorum queues; `tls` adds a listener with a certificate of its own."""

    name = "RabbitMQ"
    account = "rabbitmq"

    def __init__(self, *, tls: bool = False, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.programs = find_programs()
        self.settings = dict(settings or {})
        self.tls = tls
        self.tls_port = self._dist_port = self._names_port = 0
        self._names: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where to connect."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def tls_url(self) -> str:
        """Where to connect with TLS; `certificate` is what to trust."""
        return f"amqps://guest:guest@127.0.0.1:{self.tls_port}/"

    @property
    def certificate(self) -> Path:
        """The server's certificate, signed by itself."""
        return self.home / "certificate.pem"

    def vhost(self, name: str) -> str:
        """Create an empty virtual host and return its URL."""
        self.ctl("add_vhost", name)
        self.ctl("set_permissions", "-p", name, "guest", ".*", ".*", ".*")
        return self.url + quote(name, safe="")

    def memory_alarm(self, on: bool) -> None:
        """Make the server believe that it is out of memory, so that it blocks publishers; or end that."""
        self.ctl("set_vm_memory_high_watermark", *(("absolute", "1") if on else (MEMORY_SHARE,)))

    def ctl(self, *args: str) -> str:
        """Run rabbitmqctl against the node and return what it prints."""
        account = self._account()
        result = subprocess.run(
            [str(self.programs / "rabbitmqctl"), "--quiet", *args],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
            env={**os.environ, **self.environment()},
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[account.pw_gid] if account else None,
            timeout=CTL_SECONDS_MAX,
        )
        if result.returncode:
            raise ServerError(f"rabbitmqctl {args[0]} failed.\n{result.stdout}{result.stderr}")
        return result.stdout

    def create(self) -> None:
        """Choose the ports and make the certificate."""
        self._dist_port, self._names_port = free_port(), free_port()
        (self.home / "plugins").write_text("[].\n")
        if self.tls:
            self.tls_port = free_port()
            subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
            files = ["-keyout", str(self.home / "key.pem"), "-out", str(self.certificate)]
            key = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
            self.run(["openssl", "req", "-x509", *key, *subject, *files], "openssl")

    def command(self) -> Sequence[str]:
        """Run the node, after the name service that it registers with."""
        (self.home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in self._config()))
        self._start_names()
        return [str(self.programs / "rabbitmq-server")]

    def environment(self) -> Mapping[str, str]:
        """Point everything that Erlang or RabbitMQ would look for elsewhere into the server's directory."""
        home = str(self.home)
        return {
            "HOME": home,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._names_port),
            # A name service started by a node would outlive everybody.
            "ERL_FLAGS": "-start_epmd false",
            # With input allowed the script becomes the node, instead of waiting for it: then the node is our child.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_NODENAME": f"outrider-{self._dist_port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_CONF_ENV_FILE": f"{home}/rabbitmq-env.conf",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{home}/advanced.config",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{home}/config",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/plugins",
            "RABBITMQ_MNESIA_BASE": f"{home}/data",
            "RABBITMQ_LOG_BASE": f"{home}/logs",
            "RABBITMQ_LOGS": "-",
        }

    def ready(self) -> bool:
        """Begin a handshake; the listener opens when everything else is up."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                probe.sendall(PROTOCOL_HEADER)
                return probe.recv(1) == METHOD_FRAME
        except OSError:
            return False

    def kill(self) -> None:
        """Crash the node, and end its name service."""
        super().kill()
        names, self._names = self._names, None
        if names is not None:
            names.kill()
            names.wait()

    def _config(self) -> Iterator[tuple[str, str]]:
        yield "listeners.tcp.1", f"127.0.0.1:{self.port}"
        yield "disk_free_limit.absolute", "50MB"
        if self.tls:
            yield "listeners.ssl.1", f"127.0.0.1:{self.tls_port}"
            yield "ssl_options.certfile", str(self.certificate)
            yield "ssl_options.keyfile", str(self.home / "key.pem")
        yield from self.settings.items()

    def _start_names(self) -> None:
        program = shutil.which("epmd") or "epmd"
        address = ["-address", "127.0.0.1", "-port", str(self._names_port)]
        self._names = self.spawn([program, "-relaxed_command_check", *address])
        deadline = time.monotonic() + START_SECONDS_MAX
        while not listening(self._names_port):
            if self._names.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"Erlang's name service did not start.\n{self.log_tail()}")
            time.sleep(POLL_SECONDS)


def rabbitmq_url() -> AbstractContextManager[str]:
    """The URL of the server named by OUTRIDER_TEST_RABBITMQ, else of a private one that lives for the block.

    ```python
    with rabbitmq_url() as url:
        connection = await aio_pika.connect(url)
    ```
    """
    return given_or(VARIABLE, RabbitServer)


def find_programs() -> Path:
    """The folder of RabbitMQ's own scripts. Debian's wrappers on PATH insist on the system's instance."""
    debian = Path("/usr/lib/rabbitmq/bin")
    if (debian / "rabbitmq-server").exists():
        return debian
    if found := shutil.which("rabbitmq-server"):
        return Path(found).resolve().parent
    raise ServerMissing("RabbitMQ", "install it (Debian: rabbitmq-server), or put its programs on PATH.")
