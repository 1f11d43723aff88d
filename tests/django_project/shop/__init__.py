"""The shop: orders, and the events that tell of them."""
