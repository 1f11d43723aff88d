"""An ordinary FastAPI application, before and after Outrider."""
