"""Replay one seed and print everything that happened: `python -m tests.simulation.sagas.replay [family] SEED`."""

from __future__ import annotations

import sys

from tests.simulation.sagas.families import observe_family
from tests.simulation.sagas.world import observe


def main(arguments: list[str]) -> int:
    """Print the definition and the trace of a seed, then its end."""
    if not arguments or not arguments[-1].isdigit() or arguments[:-1] not in ([], ["family"]):
        print("usage: python -m tests.simulation.sagas.replay [family] SEED", file=sys.stderr)
        return 2
    if arguments[0] == "family":
        return replay_family(int(arguments[1]))
    world = observe(int(arguments[0]))
    for step in world.definition.steps.values():
        facts = (step.kind, f"after {step.after}", "pivot" * step.pivot, "compensate" * (step.compensation is not None))
        print(step.name, *filter(None, facts))
    end = world.problems or [f"{world.status}, and every guarantee was kept"]
    print(*world.trace.lines, *world.record.journal, *end, sep="\n")
    return 1 if world.problems else 0


def replay_family(seed: int) -> int:
    """Print the definitions and the trace of a family, then its end."""
    family = observe_family(seed)
    for saga in family.sagas:
        print(saga, *(f"{step.name}: {step.kind} after {step.after}" for step in saga.definition.steps.values()))
    ends = [f"{record.instance.saga_type} is {record.instance.status}" for record in family.records.values()]
    print(*family.trace.lines, *ends, *family.problems, sep="\n")
    return 1 if family.problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
