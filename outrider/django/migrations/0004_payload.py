"""The table of schemas: version 4 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 4."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0003_saga")]
    operations: ClassVar[list[Any]] = [Install(4)]
