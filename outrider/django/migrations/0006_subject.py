"""The keys of subjects, and the subjects of sagas: version 6 of `outrider db migrate`."""

from typing import Any, ClassVar

from django.db import migrations

from outrider.django.migration_operations import Install


class Migration(migrations.Migration):
    """Installs version 6."""

    dependencies: ClassVar[list[Any]] = [("outrider", "0005_privacy")]
    operations: ClassVar[list[Any]] = [Install(6)]
