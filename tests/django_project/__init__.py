"""A small Django project as a team would have one, for the tests of the Django app."""
