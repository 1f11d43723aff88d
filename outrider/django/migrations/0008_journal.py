"""The journal of the outbox: version 8 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 8."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0007_erasure")]
    operations: ClassVar[list[Any]] = [Install(8)]
