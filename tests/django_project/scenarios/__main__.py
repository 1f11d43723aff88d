"""Sets Django up and runs one scenario. SHOP_WITHOUT names a package that is then absent."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django_project.settings")
    modules: dict[str, Any] = sys.modules
    modules |= dict.fromkeys(filter(None, os.environ.get("SHOP_WITHOUT", "").split(",")))
    import django

    django.setup()
    module, _, function = sys.argv[1].rpartition(".")
    getattr(import_module(f"tests.django_project.scenarios.{module}"), function)()
