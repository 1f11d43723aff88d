"""The table of keys: version 5 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 5."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0004_payload")]
    operations: ClassVar[list[Any]] = [Install(5)]
