"""The shop: orders and their events."""
