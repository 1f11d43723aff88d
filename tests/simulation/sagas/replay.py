"""Replay one seed and print everything that happened: `python -m tests.simulation.sagas.replay SEED`."""

from __future__ import annotations

import sys

from tests.simulation.sagas.world import observe


def main(arguments: list[str]) -> int:
    """Print the definition and the trace of a seed, then its end."""
    if len(arguments) != 1 or not arguments[0].isdigit():
        print("usage: python -m tests.simulation.sagas.replay SEED", file=sys.stderr)
        return 2
    world = observe(int(arguments[0]))
    for step in world.definition.steps.values():
        facts = (step.kind, f"after {step.after}", "pivot" * step.pivot, "compensate" * (step.compensation is not None))
        print(step.name, *filter(None, facts))
    end = world.problems or [f"{world.status}, and every guarantee was kept"]
    print(*world.trace.lines, *world.record.journal, *end, sep="\n")
    return 1 if world.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
