"""The inbox tables: version 2 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations, models

from outrider.django.conf import table
from outrider.django.migration_operations import Install
from outrider.django.models import Identifier, Json, Moment


class Migration(migrations.Migration):
    """Installs version 2."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0001_outbox")]
    operations: ClassVar[list[Any]] = [
        Install(2),
        migrations.CreateModel(
            name="ConsumerDeadLetter",
            fields=[
                ("id", models.BigIntegerField(primary_key=True, serialize=False)),
                ("consumer", models.TextField()),
                ("event_id", Identifier()),
                ("event_type", models.TextField()),
                ("topic", models.TextField()),
                ("key", models.TextField()),
                ("sequence", models.BigIntegerField(null=True)),
                ("reason", models.TextField()),
                ("policy", models.TextField()),
                ("attempts", models.IntegerField()),
                ("received_at", Moment()),
                ("dead_lettered_at", Moment()),
                ("failure", Json()),
                ("headers", Json()),
                ("body", models.BinaryField()),
            ],
            options={
                "managed": False,
                "db_table": table("inbox_dead_letter"),
                "ordering": ("id",),
                "verbose_name": "dead letter of a consumer",
                "verbose_name_plural": "dead letters of consumers",
                "default_permissions": ("view",),
            },
        ),
    ]
