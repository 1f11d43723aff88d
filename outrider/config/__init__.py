"""Settings from options, the environment and one file, checked before anything starts.

An option wins over its variable, a variable over the file, the file over the default. What nobody reads is refused
with the nearest valid name, because a misspelt setting that is silently ignored is found in production. Secrets belong
in the environment, and are never shown.
"""

from outrider.config.kinds import nearest
from outrider.config.load import Config, check_names, load, values, variables
from outrider.config.names import LEVELS, PREFIX, RELAY_NUMBERS, SETTINGS
from outrider.config.secrets import hidden, redacted

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
