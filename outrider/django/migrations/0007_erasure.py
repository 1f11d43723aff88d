"""The log of erasures: version 7 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 7."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0006_subject")]
    operations: ClassVar[list[Any]] = [Install(7)]
