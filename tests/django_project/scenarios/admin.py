"""Visiting the admin."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any
from uuid import UUID, uuid4

from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.test import Client

from outrider.app import open_store
from outrider.django import stage
from outrider.django.conf import store_url, table
from outrider.django.models import ArchivedEvent, ConsumerDeadLetter, DeadLetter, OutboxEvent, SagaInstance
from outrider.event import Event as Staged
from tests.django_project.shop.views import placed

MODELS = ("outboxevent", "archivedevent", "deadletter", "consumerdeadletter", "sagainstance")
SECRET = "only for those who may"


def _user(*permissions: str) -> Client:
    """Return the browser of a member of staff; without permissions, of a superuser."""
    user = User.objects.create_user("ann", is_staff=True, is_superuser=not permissions)
    user.user_permissions.set(Permission.objects.filter(content_type__app_label="outrider", codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def _dead_letter(*event_ids: UUID) -> None:
    async def add_dead_letters() -> None:
        store = await open_store(store_url("default"))
        for event_id in event_ids:
            assert await store.admin.dead_letter(event_id, "test", {"error": "no such topic"}, "block")
        await store.close()

    asyncio.run(add_dead_letters())


def _stage(*numbers: str) -> list[UUID]:
    with transaction.atomic():
        return stage(*(placed(number) for number in numbers))


def _insert(name: str, **facts: Any) -> None:
    sqlite = connection.vendor == "sqlite"
    values = {column: 1000.0 if sqlite and column.endswith("_at") else value for column, value in facts.items()}
    columns, marks = ", ".join(values), ", ".join(["%s"] * len(values))
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {table(name)} ({columns}) VALUES ({marks})", list(values.values()))


def _fill() -> dict[str, Any]:
    """Put one row into each table; return their keys by model."""
    [sent] = _stage("A-1")
    call_command(
        "outrider", "relay", "--until-empty", "--broker", "null://", stdout=io.StringIO(), stderr=io.StringIO()
    )
    pending, dead = _stage("A-2", "A-3")
    _dead_letter(dead)
    saga, arrived, then = str(uuid4()), str(uuid4()), "2026-01-01 00:00+00"
    _insert(
        "saga_instance",
        **{"saga_id": saga, "saga_type": "order", "definition_version": 1, "correlation_id": "A-1"},
        **{"state": json.dumps({"note": SECRET}), "status": "running", "started_at": then, "updated_at": then},
    )
    _insert(
        "inbox_dead_letter",
        **{"id": 7, "consumer": "billing", "event_id": arrived, "event_type": "order.placed", "topic": "orders"},
        **{
            "key": "A-1",
            "band": 1,
            "headers": json.dumps({"trace": "YWJj"}),
            "body": SECRET.encode(),
            "partition": "0",
        },
        **{"position": "1", "replayed": False, "received_at": then, "reason": "poison_message", "failure": "{}"},
        **{"policy": "skip", "attempts": 3, "dead_lettered_at": then},
    )
    return {
        "outboxevent": pending,
        "archivedevent": sent,
        "deadletter": dead,
        "consumerdeadletter": 7,
        "sagainstance": saga,
    }


def _operations() -> list[tuple[str, str]]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT actor, verb FROM {table('outbox_operation')} WHERE actor <> 'test' ORDER BY id")
        return [(row[0], row[1]) for row in cursor.fetchall()]


def keyless() -> None:
    """An event that was given no key is listed with its aggregate's, and one without either with its own id."""
    with transaction.atomic():
        [_, alone] = stage(Staged("order.placed", {}, aggregate_id="A-7"), Staged("order.counted", {}))
    listed = _user().get("/admin/outrider/outboxevent/").content.decode()
    assert [f'<td class="field-stream_key">{key}</td>' in listed for key in ("A-7", alone)] == [True, True]


def looking() -> None:
    """A superuser sees every row, whole, and is offered no way to change one."""
    rows, client = _fill(), _user()
    assert [
        model.objects.count() for model in (OutboxEvent, ArchivedEvent, DeadLetter, ConsumerDeadLetter, SagaInstance)
    ] == [1] * 5
    for model in MODELS:
        listed = client.get(f"/admin/outrider/{model}/")
        assert listed.status_code == 200
        assert str(rows[model]) in listed.content.decode()
        assert f"/admin/outrider/{model}/add/" not in listed.content.decode()
        assert client.get(f"/admin/outrider/{model}/add/").status_code == 403
        page = client.get(f"/admin/outrider/{model}/{rows[model]}/change/")
        assert page.status_code == 200
        assert 'name="_save"' not in page.content.decode()
        assert "deletelink" not in page.content.decode()
        assert client.post(f"/admin/outrider/{model}/{rows[model]}/change/", {"key": "B"}).status_code == 403
        assert client.post(f"/admin/outrider/{model}/{rows[model]}/delete/", {"post": "yes"}).status_code == 403
    assert (
        "&quot;number&quot;: &quot;A-2&quot;"
        in client.get(f"/admin/outrider/outboxevent/{rows['outboxevent']}/change/").content.decode()
    )
    assert SECRET in client.get("/admin/outrider/consumerdeadletter/7/change/").content.decode()


def searching() -> None:
    """Rows are found by id and key, and chosen by state, topic, type and reason."""
    rows, client = _fill(), _user()

    def found(model: str, **query: str) -> bool:
        page = client.get(f"/admin/outrider/{model}/", query)
        assert page.status_code == 200
        return str(rows[model]) in page.content.decode().partition("result_list")[2]

    assert found("outboxevent", q=str(rows["outboxevent"]))
    assert found("outboxevent", q=" A-2 ")
    assert not found("outboxevent", q="A-")
    assert not found("outboxevent", q=str(uuid4()))
    assert found("outboxevent", state="pending")
    assert not found("outboxevent", state="parked")
    assert found("archivedevent", topic="orders", event_type="order.placed")
    assert not found("archivedevent", topic="invoices")
    assert found("deadletter", reason="by_hand")
    assert not found("deadletter", reason="poison_message")
    assert found("consumerdeadletter", consumer="billing", reason="poison_message", q="A-1")
    assert found("sagainstance", q="A-1", status="running", needs_attention__exact="0", saga_type="order")
    assert found("sagainstance", q=str(rows["sagainstance"]))
    assert not found("sagainstance", needs_attention__exact="1")


def hidden() -> None:
    """A user without permissions sees everything but payloads, and gets no actions."""
    rows = _fill()
    client = _user("view_outboxevent", "view_deadletter", "view_consumerdeadletter", "view_sagainstance")
    for model in ("outboxevent", "deadletter", "consumerdeadletter", "sagainstance"):
        page = client.get(f"/admin/outrider/{model}/{rows[model]}/change/")
        assert page.status_code == 200
        for secret in ("payload", "&quot;number&quot;", SECRET, "YWJj"):
            assert secret not in page.content.decode(), (model, secret)
        secret = "body" if model == "consumerdeadletter" else "state" if model == "sagainstance" else "payload"
        for lookup in (secret, f"{secret}__contains", f"{secret}__regex"):
            assert client.get(f"/admin/outrider/{model}/", {lookup: "A"}).status_code == 400, (model, lookup)
    assert client.get("/admin/outrider/archivedevent/").status_code == 403
    for verb in ("replay", "discard"):
        chosen = {"action": verb, "_selected_action": [str(rows["deadletter"])], "sure": "yes"}
        assert f'value="{verb}"' not in client.get("/admin/outrider/deadletter/").content.decode()
        client.post("/admin/outrider/deadletter/", chosen)
    assert DeadLetter.objects.count() == 1
    assert _operations() == []


def replaying() -> None:
    """A dead letter is sent again by who may, and it is recorded who did."""
    [dead] = _stage("A-1")
    _dead_letter(dead)
    client = _user("view_deadletter", "replay_dead_letter")
    chosen = {"action": "replay", "_selected_action": [str(dead)]}
    answer = client.post("/admin/outrider/deadletter/", chosen, follow=True)
    assert "1 dead letter sent again." in answer.content.decode()
    assert 'value="discard"' not in answer.content.decode()
    assert (DeadLetter.objects.count(), OutboxEvent.objects.count()) == (0, 1)
    assert _operations() == [("django:ann", "replay")]


def discarding() -> None:
    """A dead letter is given up after a question, of the outbox and of a consumer alike."""
    rows = _fill()
    client = _user()
    for model, number in (("deadletter", 1), ("consumerdeadletter", 2)):
        chosen = {"action": "discard", "_selected_action": [str(rows[model])]}
        question = client.post(f"/admin/outrider/{model}/", chosen)
        assert "Are you sure?" in question.content.decode()
        assert f'name="_selected_action" value="{rows[model]}"' in question.content.decode()
        assert len(_operations()) == number - 1
        answer = client.post(f"/admin/outrider/{model}/", {**chosen, "sure": "yes"}, follow=True)
        assert "1 dead letter discarded." in answer.content.decode()
        assert len(_operations()) == number
    assert (DeadLetter.objects.count(), ConsumerDeadLetter.objects.count()) == (0, 0)
    assert {actor for actor, _ in _operations()} == {"django:ann"}


def apart() -> None:
    """The admin reports an error of the store, and nothing is lost."""
    [dead] = _stage("A-1")
    _dead_letter(dead)
    client = _user()
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table('outbox_operation')} RENAME TO elsewhere")
    answer = client.post(
        "/admin/outrider/deadletter/", {"action": "replay", "_selected_action": [str(dead)]}, follow=True
    )
    assert "db migrate" in answer.content.decode()
    assert DeadLetter.objects.count() == 1
