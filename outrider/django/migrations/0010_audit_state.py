"""The states in the audit log: version 10 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 10."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0009_operation_log")]
    operations: ClassVar[list[Any]] = [Install(10)]
