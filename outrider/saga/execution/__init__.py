"""Running sagas: claims, turns, calls of user code."""
