"""Where the demo keeps its databases."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import Misuse


@dataclass(frozen=True, slots=True)
class Places:
    """The files of one run.

    >>> Places(Path("demo")).store_url
    'sqlite:///demo/shop.db'
    """

    directory: Path

    @property
    def shop(self) -> Path:
        """Return the shop's database: orders and outbox together, because they share transactions."""
        return self.directory / "shop.db"

    @property
    def log(self) -> Path:
        """Return the embedded broker's log."""
        return self.directory / "log.db"

    @property
    def received(self) -> Path:
        """Return the consumer's own database: effects and inbox together."""
        return self.directory / "received.db"

    @property
    def store_url(self) -> str:
        """Return the outbox as the relay is told of it."""
        return f"sqlite:///{self.shop}"

    @property
    def inbox_url(self) -> str:
        """Return the inbox as the consumer is told of it."""
        return f"sqlite:///{self.received}"

    @property
    def broker_url(self) -> str:
        """Return the log as relays and consumer are told of it."""
        return f"embedded:///{self.log}"


@contextmanager
def places(directory: Path | None) -> Iterator[Places]:
    """Give a temporary directory, or a chosen one, which stays."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="outrider-demo-", ignore_cleanup_errors=True) as made:
            yield Places(Path(made))
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Misuse(f"{directory} cannot be made ({error.strerror}); name another directory with --dir") from error
    chosen = Places(directory)
    if taken := [path.name for path in (chosen.shop, chosen.log, chosen.received) if path.exists()]:
        raise Misuse(f"{directory} holds {', '.join(taken)} of another run; name an empty directory with --dir")
    yield chosen
