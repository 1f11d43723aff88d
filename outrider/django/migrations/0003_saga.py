"""The saga tables: version 3 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations, models

from outrider.django.conf import table
from outrider.django.migration_operations import Install
from outrider.django.models import Identifier, Json, Moment


class Migration(migrations.Migration):
    """Installs version 3."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0002_inbox")]
    operations: ClassVar[list[Any]] = [
        Install(3),
        migrations.CreateModel(
            name="SagaInstance",
            fields=[
                ("saga_id", Identifier(primary_key=True, serialize=False)),
                ("saga_type", models.TextField()),
                ("definition_version", models.IntegerField()),
                ("correlation_id", models.TextField()),
                ("status", models.TextField()),
                ("current_step", models.TextField(null=True)),
                ("needs_attention", models.BooleanField()),
                ("last_error", models.TextField(null=True)),
                ("retry_count", models.IntegerField()),
                ("started_at", Moment()),
                ("updated_at", Moment()),
                ("ended_at", Moment(null=True)),
                ("wake_at", Moment(null=True)),
                ("state", Json()),
            ],
            options={
                "managed": False,
                "db_table": table("saga_instance"),
                "ordering": ("-updated_at",),
                "default_permissions": ("view",),
            },
        ),
    ]
