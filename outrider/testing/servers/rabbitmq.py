"""A throw-away RabbitMQ.

The node, its name service and its command-line tool share a private port and a private cookie. The server can therefore
run beside any other Erlang system on the machine.
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
ADD_VHOST = """
Name = <<"%s"/utf8>>, Guest = <<"guest">>, All = <<".*">>,
ok = rabbit_vhost:add(Name, Guest),
ok = rabbit_auth_backend_internal:set_permissions(Guest, Name, All, All, All, Guest).
"""
MEMORY_SHARE = "0.4"
"""The share of the machine's memory above which the server blocks publishers: RabbitMQ's default."""


class RabbitServer(Server):
    """One RabbitMQ node with the user guest and quorum queues; `tls` adds a listener with a self-signed certificate."""

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
        """The URL of the server."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    @property
    def tls_url(self) -> str:
        """The URL for TLS; clients must trust `certificate`."""
        return f"amqps://guest:guest@127.0.0.1:{self.tls_port}/"

    @property
    def certificate(self) -> Path:
        """The self-signed certificate of the server."""
        return self.home / "certificate.pem"

    def vhost(self, name: str) -> str:
        """Create an empty virtual host and return its URL."""
        # One evaluation instead of two commands: each command starts Erlang, which takes longer than the work.
        self.evaluate(ADD_VHOST % name.replace("\\", r"\\").replace('"', r"\""))
        return self.url + quote(name, safe="")

    def evaluate(self, expressions: str) -> None:
        """Evaluate Erlang expressions in the node."""
        if program := shutil.which("erl_call"):
            # A small program that speaks the protocol of nodes, where rabbitmqctl starts Erlang for two seconds.
            answer = self._run([program, "-sname", self._node_name, "-e"], "erl_call", expressions)
            if not answer.startswith("{ok,"):
                raise ServerError(f"the node rejected the expressions: {answer}")
        else:
            self.ctl("eval", expressions)

    def memory_alarm(self, on: bool) -> None:
        """Set or clear the memory alarm, during which the server blocks publishers."""
        self.ctl("set_vm_memory_high_watermark", *(("absolute", "1") if on else (MEMORY_SHARE,)))

    def ctl(self, *args: str) -> str:
        """Run rabbitmqctl against the node and return its output."""
        return self._run([str(self.programs / "rabbitmqctl"), "--quiet", *args], f"rabbitmqctl {args[0]}")

    def _run(self, command: Sequence[str], what: str, text: str = "") -> str:
        account = self._account()
        result = subprocess.run(
            command,
            input=text,
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
            raise ServerError(f"{what} failed.\n{result.stdout}{result.stderr}")
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
        """Return the command line of the node, after starting the name service in which the node registers."""
        (self.home / "rabbitmq.conf").write_text("".join(f"{name} = {value}\n" for name, value in self._config()))
        self._start_names()
        return [str(self.programs / "rabbitmq-server")]

    def environment(self) -> Mapping[str, str]:
        """Point every path of Erlang and RabbitMQ into the directory of the server."""
        home = str(self.home)
        return {
            "HOME": home,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._names_port),
            # A name service started by a node would outlive the node and the test.
            "ERL_FLAGS": "-start_epmd false",
            # With input allowed the script replaces itself with the node instead of waiting; the node is then our child
            # process.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_NODENAME": self._node_name,
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
        """Begin a handshake; the listener opens after everything else has started."""
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

    @property
    def _node_name(self) -> str:
        return f"outrider-{self._dist_port}@localhost"

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
    """Return the URL in OUTRIDER_TEST_RABBITMQ, or start a private server for the duration of the block.

    ```python
    with rabbitmq_url() as url:
        connection = await aio_pika.connect(url)
    ```
    """
    return given_or(VARIABLE, RabbitServer)


def find_programs() -> Path:
    """Return the folder of RabbitMQ's own scripts. Debian's wrappers on PATH only control the system's instance."""
    debian = Path("/usr/lib/rabbitmq/bin")
    if (debian / "rabbitmq-server").exists():
        return debian
    if found := shutil.which("rabbitmq-server"):
        return Path(found).resolve().parent
    raise ServerMissing("RabbitMQ", "install it (Debian: rabbitmq-server), or put its programs on PATH.")
