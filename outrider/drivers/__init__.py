"""Database drivers: staging through the connection of the caller, with a module per driver."""
