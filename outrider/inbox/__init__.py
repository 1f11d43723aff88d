"""The inbox: the effects of a consumer happen exactly once, in the order of every key."""
