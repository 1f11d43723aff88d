"""Who runs on which core: everything everywhere, or the client on one core and the servers on the others.

With a core of its own, a client is as fast as it would be with the servers on machines of their own. A process that is
started inside the block inherits where its parent may run, and so does a thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider.testing.servers.server import children_of


@contextmanager
def apart(servers: Iterable[int]) -> Iterator[None]:
    """Keep this process, and what it starts, on one core for the block, and the servers off it."""
    everywhere = os.sched_getaffinity(0)
    mine, *others = sorted(everywhere)
    if not others:
        raise RuntimeError("this needs two cores at least")
    pids = [pid for server in servers for pid in (server, *children_of(server))]
    try:
        _pin(pids, set(others))
        os.sched_setaffinity(0, {mine})
        yield
    finally:
        os.sched_setaffinity(0, everywhere)
        _pin(pids, everywhere)


def _pin(pids: Iterable[int], cores: set[int]) -> None:
    for pid in pids:
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            # A thread may have ended since it was listed.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
