"""Replay one seed and print everything that happened: `python -m tests.simulation.replay SEED`."""

from __future__ import annotations

import sys

from tests.simulation.virtual import VirtualLoop
from tests.simulation.world import Options, World


def main(arguments: list[str]) -> int:
    """Print the trace of a seed, then what was wrong with it."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m tests.simulation.replay SEED", file=sys.stderr)
        return 2
    loop = VirtualLoop()
    world = World(int(arguments[0]), loop, Options())
    try:
        loop.run_until_complete(world.live())
    finally:
        loop.close()
        print(*world.record.trace, sep="\n")
    print(*(world.violations or ["every guarantee was kept"]), sep="\n")
    return 1 if world.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
