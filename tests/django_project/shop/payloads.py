"""The payloads of the shop: an order has a number, and the address of its customer is encrypted."""

from outrider.payload import Payloads, required_fields
from outrider.privacy import FieldEncryption, KeyRing

payloads = Payloads(
    rules=[required_fields("order.*", "number")],
    encryption=FieldEncryption(
        keys=KeyRing.from_environment("SHOP_KEYS"),
        sensitive={"order.placed": ["email"]},
        sagas={"placing": ["number"]},
    ),
)
