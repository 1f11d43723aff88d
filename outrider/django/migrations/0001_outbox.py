"""The tables of outbox, archive and dead letters: version 1 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations, models

from outrider.django.conf import table
from outrider.django.migration_operations import Install
from outrider.django.models import Identifier, Json, Moment

STAGED: list[tuple[str, Any]] = [
    ("event_id", Identifier(primary_key=True, serialize=False)),
    ("position", models.BigIntegerField(db_column="id")),
    ("event_type", models.TextField()),
    ("aggregate_type", models.TextField(null=True)),
    ("aggregate_id", models.TextField(null=True)),
    ("topic", models.TextField(null=True)),
    ("key", models.TextField(null=True)),
    ("routing_key", models.TextField(null=True)),
    ("priority", models.SmallIntegerField()),
    ("sequence", models.BigIntegerField(null=True)),
    ("schema_version", models.TextField()),
    ("saga_id", models.TextField(null=True)),
    ("attempts", models.SmallIntegerField()),
    ("created_at", Moment()),
    ("headers", Json()),
    ("payload", Json()),
]


class Migration(migrations.Migration):
    """Installs version 1."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        Install(1),
        migrations.CreateModel(
            name="OutboxEvent",
            fields=[
                *((name, field.clone()) for name, field in STAGED),
                ("state", models.TextField()),
                ("available_at", Moment(null=True)),
                ("lane", models.SmallIntegerField(null=True)),
                ("failure", Json(null=True)),
            ],
            options={
                "managed": False,
                "db_table": table("outbox"),
                "ordering": ("position",),
                "verbose_name": "undelivered event",
                "default_permissions": ("view",),
                "permissions": (("view_payload", "Can see what is in events and sagas"),),
            },
        ),
        migrations.CreateModel(
            name="ArchivedEvent",
            fields=[*((name, field.clone()) for name, field in STAGED), ("sent_at", Moment())],
            options={
                "managed": False,
                "db_table": table("outbox_archive"),
                "ordering": ("-sent_at",),
                "verbose_name": "delivered event",
                "default_permissions": ("view",),
            },
        ),
        migrations.CreateModel(
            name="DeadLetter",
            fields=[
                *((name, field.clone()) for name, field in STAGED),
                ("reason", models.TextField()),
                ("policy", models.TextField()),
                ("dead_lettered_at", Moment()),
                ("lane", models.SmallIntegerField()),
                ("failure", Json(null=True)),
            ],
            options={
                "managed": False,
                "db_table": table("outbox_dead_letter"),
                "ordering": ("position",),
                "default_permissions": ("view",),
                "permissions": (
                    ("replay_dead_letter", "Can send dead letters again"),
                    ("discard_dead_letter", "Can give dead letters up"),
                ),
            },
        ),
    ]
