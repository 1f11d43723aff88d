"""Replay one seed and print everything that happened: `python -m tests.simulation.sagas.replay SEED`."""

from __future__ import annotations

import sys

from tests.simulation.sagas.world import Unsound, World


def main(arguments: list[str]) -> int:
    """Print the definition and the trace of a seed, then its end."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m tests.simulation.sagas.replay SEED", file=sys.stderr)
        return 2
    world = World(int(arguments[0]))
    for step in world.definition.steps.values():
        facts = (step.kind, f"after {step.after}", "pivot" * step.pivot, "compensate" * (step.compensation is not None))
        print(step.name, *filter(None, facts))
    try:
        world.run()
    except Unsound as found:
        end = str(found)
    else:
        end = f"{world.shelf.instance.status}, and every promise was kept"
    print(*world.lines, *world.shelf.journal.values(), end, sep="\n")
    return 0 if end.endswith("kept") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
