"""Which queues a message would reach, by the bindings. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.brokers.rabbitmq.management import Binding, Queue, Topology


def reached(topology: Topology, exchange: str, routing_key: str | None) -> list[Queue]:
    """Return the queues a message reaches, over other exchanges too; without a routing key, those any might reach.

    >>> bound = Binding("shop", "audit", True, "order.*")
    >>> [queue.name for queue in reached(Topology({}, {"audit": Queue("audit")}, (bound,)), "shop", "order.placed")]
    ['audit']
    """
    names: dict[str, None] = {}
    seen: set[str] = set()
    waiting = [exchange]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if not current:
            names |= dict.fromkeys([routing_key] if routing_key is not None else topology.queues)
            continue
        taken = _taken(topology, current, routing_key)
        names |= {binding.target: None for binding in taken if binding.to_queue}
        waiting += [binding.target for binding in taken if not binding.to_queue]
        known = topology.exchanges.get(current)
        if not taken and known is not None and known.alternate:
            waiting.append(known.alternate)
    return [topology.queues[name] for name in names if name in topology.queues]


def _taken(topology: Topology, exchange: str, routing_key: str | None) -> list[Binding]:
    known = topology.exchanges.get(exchange)
    kind = known.kind if known is not None else "topic"
    bindings = [binding for binding in topology.bindings if binding.source == exchange]
    if routing_key is None:
        return bindings
    return [binding for binding in bindings if takes(kind, binding.pattern, routing_key)]


def takes(kind: str, pattern: str, routing_key: str) -> bool:
    """Tell whether a binding takes a routing key. Kinds that decide by other means might.

    >>> takes("topic", "order.#", "order.placed.eu"), takes("topic", "order.*", "order.placed.eu")
    (True, False)
    """
    if kind == "topic":
        return _matches(pattern.split("."), routing_key.split("."))
    return pattern == routing_key if kind == "direct" else True


def _matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Match words: `*` stands for one, `#` for any number. Keeps the places in the pattern that are possible so far."""
    places = _skipping(pattern, {0})
    for word in words:
        onward = {at + 1 for at in places if at < len(pattern) and pattern[at] in (word, "*")}
        places = _skipping(pattern, onward | {at for at in places if at < len(pattern) and pattern[at] == "#"})
    return len(pattern) in places


def _skipping(pattern: Sequence[str], places: set[int]) -> set[int]:
    found = set(places)
    for at in range(len(pattern)):
        if at in found and pattern[at] == "#":
            found.add(at + 1)
    return found
