"""Privacy: encrypted fields in payloads, and the ring of keys that opens them."""

from outrider.privacy.encryption import FieldEncryption
from outrider.privacy.keys import DataKey, EnvironmentKeys, FileKeys, KeyFacts, KeyRing, KeySet, KeySource
from outrider.privacy.subjects import SubjectKeys

__all__ = [
    "DataKey",
    "EnvironmentKeys",
    "FieldEncryption",
    "FileKeys",
    "KeyFacts",
    "KeyRing",
    "KeySet",
    "KeySource",
    "SubjectKeys",
]
