"""What a driver does through a caller's session, by verb; each is a generator of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.stores.mongo import saga_writing, staging
from outrider.stores.mongo.steps import Steps

SCRIPTS: dict[str, Callable[..., Steps[Any]]] = {
    "stage": staging.stage,
    "start_saga": saga_writing.start,
    "post_mail": saga_writing.post,
    "barrier_enter": saga_writing.enter,
    "barrier_keep": saga_writing.keep,
}
