"""Staging beside orders."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction

from outrider import Event, InvalidEvent, NotInTransaction, UsageError
from outrider.django import conf, outbox, stage
from outrider.django.conf import store_url
from outrider.django.models import OutboxEvent as Row
from tests.django_project.shop.models import Order
from tests.django_project.shop.sagas import Placing, placing
from tests.django_project.shop.views import placed


def commit() -> None:
    """An event is there with its order, and can be read as a row."""
    with transaction.atomic():
        Order.objects.create(number="A-1")
        [event_id] = stage(placed("A-1"))
    row = Row.objects.get(pk=event_id)
    assert (row.event_type, row.key, row.state, row.payload) == ("order.placed", "A-1", "pending", {"number": "A-1"})
    assert datetime.now(UTC) - row.created_at < timedelta(minutes=5)
    assert Row.objects.filter(created_at__gt=datetime.now(UTC) - timedelta(minutes=5)).count() == 1


def rollback() -> None:
    """An event goes with its order, and a savepoint takes back its own events only."""
    with transaction.atomic():
        [kept] = stage(placed("A-1"))
        try:
            with transaction.atomic():
                stage(placed("A-2"))
                raise RuntimeError("back to the savepoint")
        except RuntimeError:
            pass
    assert [row.pk for row in Row.objects.all()] == [kept]
    try:
        with transaction.atomic():
            Order.objects.create(number="A-3")
            stage(placed("A-3"))
            raise RuntimeError("back to the beginning")
    except RuntimeError:
        pass
    assert [row.pk for row in Row.objects.all()] == [kept]
    assert not Order.objects.exists()


def usage_errors() -> None:
    """Nothing is staged outside of a transaction, and only a transaction writes rows."""
    with pytest.raises(NotInTransaction, match="inside `with transaction"):
        stage(placed("A-1"))
    with pytest.raises(UsageError, match="written by Outrider alone"):
        Row(event_type="order.placed").save()
    with pytest.raises(UsageError, match="written by Outrider alone"):
        Row().delete()
    assert not Row.objects.exists()


def waking() -> None:
    """A commit wakes relays, and a rollback does not."""
    # Another scenario of this module runs without the driver.
    from outrider.stores.postgres import PostgresStore
    from outrider.stores.postgres.wakeup import NotificationListener

    woken, listening, done = threading.Event(), threading.Event(), threading.Event()

    async def listen() -> None:
        store = await PostgresStore.open(store_url("default"))
        # Only notifications: a relay also looks at the id sequence.
        async with NotificationListener(store.database, "outrider_outbox").listening(woken.set):
            listening.set()
            await asyncio.to_thread(done.wait, 60)
        await store.close()

    thread = threading.Thread(target=asyncio.run, args=(listen(),))
    thread.start()
    try:
        assert listening.wait(30)
        try:
            with transaction.atomic():
                stage(placed("A-1"))
                assert len(connection.run_on_commit) == 1
                raise RuntimeError("nobody is to hear of this")
        except RuntimeError:
            assert connection.run_on_commit == []
        with transaction.atomic():
            stage(placed("A-2"))
        assert woken.wait(30), "no relay was woken"
    finally:
        done.set()
        thread.join()


def payloads() -> None:
    """PAYLOADS checks and encrypts, in `stage`, at the start of a saga, and in commands."""
    with pytest.raises(InvalidEvent, match=r"payload\.number: "), transaction.atomic():
        stage(Event("order.placed", {"email": "ann@example.com"}))
    with transaction.atomic():
        [event_id] = stage(Event("order.placed", {"number": "A-1", "email": "ann@example.com"}))
        saga_id = placing.start_sync(connection, Placing("ann@example.com"), correlation_id="A-1", outbox=outbox())
    [row] = Row.objects.all()
    assert (row.payload["number"], set(row.payload["email"])) == ("A-1", {"$encrypted", "key", "nonce", "data"})
    table = conf.table("saga_instance")
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT state FROM {table}")
        assert "ann@example.com" not in str(cursor.fetchall())
    for arguments in (["events", "show", str(event_id), "--payload"], ["saga", "show", str(saga_id), "--state"]):
        output = io.StringIO()
        call_command("outrider", *arguments, "--json", stdout=output)
        assert "ann@example.com" in output.getvalue()


def silent() -> None:
    """With WAKE off, a commit asks for nothing."""
    with transaction.atomic():
        stage(placed("A-1"))
        assert connection.run_on_commit == []


def second() -> None:
    """OUTRIDER["DATABASE"] says where events go, and where they are read."""
    with transaction.atomic(using="second"):
        stage(placed("A-1"))
        stage(placed("A-2"), using="second")
    assert [row.key for row in Row.objects.all()] == ["A-1", "A-2"]
    assert Row.objects.all().db == "second"


def manual() -> None:
    """With AUTOCOMMIT off a transaction is always open; an event is committed or rolled back with it."""
    for number, end in (("A-1", transaction.rollback), ("A-2", transaction.commit)):
        Order.objects.create(number=number)
        stage(placed(number))
        end()
    assert [row.key for row in Row.objects.all()] == ["A-2"]
    transaction.rollback()


def commands() -> None:
    """`call_command` runs our command line, with its output and its exit code."""
    with transaction.atomic():
        stage(Event("order.placed", {}, topic="orders", key="A-1"))
    output = io.StringIO()
    call_command("outrider", "events", "list", "--json", stdout=output)
    assert [row["key"] for row in json.loads(output.getvalue())] == ["A-1"]
    errors = io.StringIO()
    with pytest.raises(CommandError, match="ended with exit code 2"):
        call_command("outrider", "events", "list", "--state", "pendign", stdout=output, stderr=errors)
    assert "did you mean pending?" in errors.getvalue()


def plain() -> None:
    """Migrating and staging need neither users nor pages, nor a driver of our own."""
    call_command("migrate", verbosity=0)
    call_command("check", "--database", "default", stdout=io.StringIO(), stderr=io.StringIO())
    commit()
