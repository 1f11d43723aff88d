"""Outrider's tables in a project with Alembic: a revision installs the tables, and autogenerate ignores them.

The migration steps are those of `outrider db migrate`, with the same record of installed steps: the first tool
installs, and the other skips. Print a ready revision with `outrider db alembic`; in `env.py`, pass
`include_object=skip_outrider` to both calls of `context.configure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from outrider.app import installer_for
from outrider.errors import UsageError
from outrider.stores.migrations import LANES_DEFAULT

_TABLE = re.compile(r"CREATE TABLE (?:IF NOT EXISTS )?(?:\w+\.)?(\w+)")
_PARTITION = re.compile(r"outbox_archive_\d{8}")


def install(op: Any, *, version: int, schema: str = "outrider", lanes: int | None = None, after: int = 0) -> None:
    """Bring Outrider's tables up to a version, inside the `upgrade` of a revision::

        from alembic import op
        from outrider.alembic import install

        def upgrade() -> None:
            install(op, version=10)

    Steps that are already installed are checked and skipped. With `alembic upgrade --sql` there is no database to ask,
    so the SQL of all versions after `after` is written. `lanes` is fixed by the first installation.
    """
    installer = installer_for(op.get_context().dialect.name, schema=schema)
    known = _last(installer)
    if not 0 <= after < version <= known:
        raise UsageError(f"cannot install version {version} after {after}; this outrider knows versions 1 to {known}")
    if op.get_context().as_sql:
        _write(op, installer.written(version, lanes, after=after))
    else:
        installer.run(installer.install(version, lanes), _executing(op))


def remove(op: Any, *, version: int = 1, schema: str = "outrider") -> None:
    """Remove a version and all later versions, inside the `downgrade` of a revision::

        def downgrade() -> None:
            remove(op, version=1)

    Archive, receipts and journals are lost. The call is rejected while an event is undelivered, a dead letter is
    undecided, or a saga is running; with `--sql` the database cannot be asked, and the check is skipped.
    """
    installer = installer_for(op.get_context().dialect.name, schema=schema)
    if op.get_context().as_sql:
        doomed = sorted({step.version for step in installer.steps(1) if step.version >= version}, reverse=True)
        _write(op, installer.unwritten(*doomed, bare=version == 1))
    else:
        installer.run(installer.remove(version), _executing(op))


def skip_outrider(entry: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """Make autogenerate ignore Outrider's tables, which have no model; pass the function as `include_object`::

        context.configure(connection=connection, target_metadata=metadata, include_object=skip_outrider)

    A table of the application that has a model is compared, whatever its name is.

    >>> skip_outrider(None, "outbox_archive_20260131", "table", True, None)
    False
    """
    return not (type_ == "table" and reflected and compare_to is None and _is_ours(str(name)))


def revision(identifier: str, *, revises: str | None, schema: str, lanes: int | None, after: int = 0) -> str:
    """Return the text of a revision that installs the current version.

    >>> print(revision("8f2a", revises=None, schema="outrider", lanes=None).splitlines()[0])
    \"\"\"Install Outrider's tables, version 10.
    """
    version = _last(installer_for("postgresql", schema=schema))
    if revises is not None and not revises.isidentifier() and not revises.isalnum():
        raise UsageError(f"{revises!r} is no revision; `alembic heads` lists the last one")
    arguments = [f"version={version}"]
    arguments += [f'schema="{schema}"'] if schema != "outrider" else []
    remove_arguments = ", ".join(["op", f"version={after + 1}", *arguments[1:]])
    arguments += [f"lanes={lanes}"] if lanes not in (None, LANES_DEFAULT) else []
    arguments += [f"after={after}"] if after else []
    return _REVISION.format(
        version=version,
        identifier=identifier,
        revises=revises or "nothing",
        down=f'"{revises}"' if revises else "None",
        install=", ".join(["op", *arguments]),
        remove=remove_arguments,
    )


_REVISION = '''"""Install Outrider's tables, version {version}.

Revision ID: {identifier}
Revises: {revises}
"""

from alembic import op

from outrider.alembic import install, remove

revision = "{identifier}"
down_revision = {down}
branch_labels = None
depends_on = None


def upgrade() -> None:
    install({install})


def downgrade() -> None:
    remove({remove})
'''


def _is_ours(name: str) -> bool:
    return name in _tables() or _PARTITION.fullmatch(name) is not None


@cache
def _tables() -> frozenset[str]:
    installers = [installer_for(vendor) for vendor in ("postgresql", "sqlite")]
    texts = [text for installer in installers for text in installer.written(_last(installer), 1)]
    return frozenset(name for text in texts for name in _TABLE.findall(text))


def _last(installer: Any) -> int:
    return int(max(step.version for step in installer.steps(1)))


def _write(op: Any, texts: Iterable[str]) -> None:
    # Not with `op.execute`, which would read colons and percent signs as parameters.
    for text in texts:
        op.get_context().impl.static_output(f"{text.rstrip().removesuffix(';')};\n")


def _executing(op: Any) -> Any:
    bind = op.get_bind()
    if bind.dialect.name == "sqlite" and not bind.connection.driver_connection.in_transaction:
        # Python's driver begins a transaction at the first INSERT only; a step and its record must commit together.
        bind.exec_driver_sql("BEGIN IMMEDIATE")

    def execute(text: str) -> Sequence[Sequence[Any]]:
        # Without parameters, so that a percent sign is taken literally.
        result = bind.exec_driver_sql(text, execution_options={"no_parameters": True})
        return [tuple(row) for row in result] if result.returns_rows else ()

    return execute
