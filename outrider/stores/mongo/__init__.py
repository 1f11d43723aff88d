"""Events in MongoDB: a database of collections beside those of the application, in the same transactions."""

from outrider.stores.mongo.inbox import MongoInbox
from outrider.stores.mongo.saga import MongoSagas
from outrider.stores.mongo.schema import MongoSchema
from outrider.stores.mongo.store import MongoStore

__all__ = ["MongoInbox", "MongoSagas", "MongoSchema", "MongoStore"]
