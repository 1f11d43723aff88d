"""The admin: rows to look at, payloads for those who may, decisions about dead letters for those who may."""

from __future__ import annotations

import json

from tests.django_project.project import Project


def test_an_event_is_listed_with_the_key_that_orders_it(project: Project) -> None:
    project.scenario("admin.keyless")


def test_a_superuser_sees_every_row_and_can_change_none(project: Project) -> None:
    project.scenario("admin.looking")


def test_rows_are_found_by_whole_ids_and_keys_and_by_filters(project: Project) -> None:
    project.scenario("admin.searching")


def test_payloads_and_actions_are_for_those_with_the_permission(project: Project) -> None:
    project.scenario("admin.hidden")


def test_a_dead_letter_is_sent_again_and_it_is_recorded_who_did(project: Project) -> None:
    # With the request in a transaction that holds SQLite's only lock, a store that waited for it would never get it.
    project.scenario("admin.replaying", SHOP_DATABASE_EXTRA=json.dumps({"ATOMIC_REQUESTS": True}))


def test_a_dead_letter_is_given_up_only_after_a_question(project: Project) -> None:
    project.scenario("admin.discarding")


def test_an_error_of_the_store_is_shown_in_the_admin(project: Project) -> None:
    project.scenario("admin.apart")
