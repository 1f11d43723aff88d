"""Payloads: JSON Schema, rules, versions and encrypted fields, in one object for the whole way of an event.

Staging checks what is written, a relay what is published, and consumers and sagas get each event in the current version
of its type.
"""

from outrider.payload.model import OnInvalid, PayloadCipher, PayloadFacts, PayloadSchema, SchemaSource, Version
from outrider.payload.payloads import Payloads
from outrider.payload.registry import SchemaRegistry
from outrider.payload.rules import IncreasingField, Rule, required_fields, strictly_increasing
from outrider.payload.schemas import SchemaFolder, SchemaSet
from outrider.payload.upcasters import Upcaster

__all__ = [
    "IncreasingField",
    "OnInvalid",
    "PayloadCipher",
    "PayloadFacts",
    "PayloadSchema",
    "Payloads",
    "Rule",
    "SchemaFolder",
    "SchemaRegistry",
    "SchemaSet",
    "SchemaSource",
    "Upcaster",
    "Version",
    "required_fields",
    "strictly_increasing",
]
