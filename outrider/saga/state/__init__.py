"""The state of a saga: to JSON and back, checked for loss."""
