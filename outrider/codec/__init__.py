"""From event to message, and back."""
