"""A shop that keeps its orders in a table. `before.py` is without Outrider; `shop.py` publishes each order."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import outrider

CREDIT_CENTS = 10_000


class Base(DeclarativeBase):
    """The tables."""


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    number: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]
    cents: Mapped[int]


class NewOrder(BaseModel):
    """The body of a request that places an order."""

    number: str
    customer: str
    cents: int


async def check_credit(session: AsyncSession, customer: str) -> None:
    """Reject an order that exceeds the credit of its customer."""
    due = await session.scalar(select(func.sum(Order.cents)).where(Order.customer == customer))
    if due is not None and due > CREDIT_CENTS:
        raise HTTPException(409, f"{customer} would owe {due} cents; the limit is {CREDIT_CENTS}")


def create_app(database: str = os.environ.get("SHOP_DATABASE", "sqlite+aiosqlite:///shop.db")) -> FastAPI:
    """Return the application on a database, named by its SQLAlchemy URL."""
    engine = create_async_engine(database)
    sessions = async_sessionmaker(engine, expire_on_commit=False)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine.begin() as conn:
            await conn.run_sync(Base.metadata.create_all)
        yield
        await engine.dispose()

    app = FastAPI(title="Shop", lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def place_order(new: NewOrder) -> NewOrder:
        async with sessions.begin() as session:
            session.add(Order(**new.model_dump()))
            placed = outrider.Event("order.placed", new.model_dump(), aggregate_id=new.number, key=new.customer)
            await outrider.stage(session, placed)
            await check_credit(session, new.customer)
        return new

    @app.get("/orders")
    async def list_orders() -> list[NewOrder]:
        async with sessions() as session:
            orders = await session.scalars(select(Order).order_by(Order.number))
            return [NewOrder.model_validate(order, from_attributes=True) for order in orders]

    return app
