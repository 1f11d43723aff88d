"""The shop's tables."""

from typing import Any, ClassVar

from django.db import migrations, models


class Migration(migrations.Migration):
    """Makes the orders."""

    initial = True
    dependencies: ClassVar[list[Any]] = []
    operations: ClassVar[list[Any]] = [
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.TextField(unique=True)),
            ],
        ),
    ]
