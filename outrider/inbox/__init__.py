"""The inbox: a consumer's effects happen exactly once, in the order of each key."""
