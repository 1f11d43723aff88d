"""Settings of the project. SHOP_DATABASE says where its data is; a few other variables turn things on for a test."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.parse import unquote, urlsplit


def _database(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        options: dict[str, Any] = {"timeout": 10}
        if mode := os.environ.get("SHOP_TRANSACTION_MODE", "IMMEDIATE"):
            options["transaction_mode"] = mode
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///"), "OPTIONS": options}
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path.lstrip("/"),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
    }


SECRET_KEY = "no secret at all"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.django_project.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
STATIC_URL = "static/"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "outrider.django",
    "tests.django_project.shop",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

DATABASES = {"default": _database(os.environ["SHOP_DATABASE"])}
if "SHOP_SECOND_DATABASE" in os.environ:
    DATABASES["second"] = _database(os.environ["SHOP_SECOND_DATABASE"])
DATABASES["default"] |= json.loads(os.environ.get("SHOP_DATABASE_EXTRA", "{}"))
if "SHOP_OUTRIDER" in os.environ:
    OUTRIDER = json.loads(os.environ["SHOP_OUTRIDER"])
if "SHOP_PLAIN" in os.environ:
    # A service without pages or users.
    del ROOT_URLCONF
    INSTALLED_APPS, MIDDLEWARE, TEMPLATES = INSTALLED_APPS[-2:], [], []
