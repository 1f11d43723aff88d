"""Events in MongoDB, in collections beside the data of the application and in the same transactions."""

from outrider.stores.mongo.erasure import MongoErasure
from outrider.stores.mongo.inbox import MongoInbox
from outrider.stores.mongo.outbox import MongoStore
from outrider.stores.mongo.payload import MongoPayloads
from outrider.stores.mongo.privacy import MongoPrivacy
from outrider.stores.mongo.saga import MongoSagas
from outrider.stores.mongo.schema import MongoSchema

__all__ = ["MongoErasure", "MongoInbox", "MongoPayloads", "MongoPrivacy", "MongoSagas", "MongoSchema", "MongoStore"]
