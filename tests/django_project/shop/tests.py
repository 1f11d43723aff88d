"""The shop's own tests, run by `manage.py test`: each is rolled back, with the events it stages."""

from __future__ import annotations

from django.db import transaction
from django.test import TestCase, TransactionTestCase

from outrider.django import stage
from outrider.django.models import OutboxEvent
from tests.django_project.shop.views import placed


class StagingTest(TestCase):
    """Two alike: either would fail if the other left its event behind."""

    def test_first(self) -> None:
        """Stage the only event there is."""
        self.stage_alone()

    def test_second(self) -> None:
        """Stage the only event there is."""
        self.stage_alone()

    def stage_alone(self) -> None:
        with self.captureOnCommitCallbacks():
            stage(placed("A-1"))
        assert [event.key for event in OutboxEvent.objects.all()] == ["A-1"]


class CommittingTest(TransactionTestCase):
    """One that really commits."""

    def test_third(self) -> None:
        """Stage, commit, and leave no connection behind that would keep the test database from being dropped."""
        with transaction.atomic():
            stage(placed("A-1"))
        assert [event.key for event in OutboxEvent.objects.all()] == ["A-1"]
