"""Settings from options, the environment and one file, checked before anything starts.

An option wins over its variable, a variable over the file, the file over the default. An unknown name is rejected with
the nearest valid name: a misspelt setting must be found before production. Secrets belong in the environment, and are
never shown.
"""

from outrider.config.loader import Config, check_names, load, values, variables
from outrider.config.schema import LEVELS, PREFIX, RELAY_NUMBERS, SETTINGS, nearest
from outrider.redaction import hidden, redacted

__all__ = [
    "LEVELS",
    "PREFIX",
    "RELAY_NUMBERS",
    "SETTINGS",
    "Config",
    "check_names",
    "hidden",
    "load",
    "nearest",
    "redacted",
    "values",
    "variables",
]
