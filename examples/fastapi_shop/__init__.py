"""An ordinary FastAPI application, and what changes in it."""
