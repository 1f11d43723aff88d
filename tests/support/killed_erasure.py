"""A run of an erasure that kills itself with SIGKILL at one of its commits: just before it, or just after it.

The arguments are the URL of the store, the subject, the number of the commit, and `before` or `after`. Each verb that
writes is wrapped from outside. Without enough commits the run ends with 0.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from outrider import app
from outrider.privacy.erasure import Erasure, KeyDestruction
from outrider.testing.contracts.erasure import KilledStores


class Fuse(KilledStores):
    """The stores of a run, with a real end."""

    def end(self) -> None:
        """Kill this process, as an operator or the kernel does."""
        print(self.names[-1], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


async def main(url: str, subject: str, commit: str, moment: str) -> int:
    """Run to the commit, or to the end."""
    erasure, privacy = await app.open_erasure(url), await app.open_privacy(url)
    stores: Any = Fuse((erasure, KeyDestruction(privacy)), int(commit), moment == "after")
    results = await Erasure([subject], stores, stores, "ann").run()
    await erasure.close()
    await privacy.close()
    return 0 if all(result.is_complete for result in results) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
