"""The latest grant of an action is in its row: one that is given and ends with its action costs no row of its own.

`grants` is a view of these and of the earlier grants, which have a table.

Revision 0019, after 0018.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")

ADDED = {"core_ids": JSON, "cell_ids": JSON, "background": sa.Boolean(), "resized_at": sa.Double()}
SAME = f"node, units, granted_at, resource, {', '.join(ADDED)}"
# A grant that was given back before the end is no part of its action's row, which then names no node.
LATEST = """
FROM grants WHERE grants.action = actions.id AND grants.attempt = actions.attempts AND actions.node IS NOT NULL
AND (grants.released_at = actions.ended_at OR (grants.released_at IS NULL AND actions.ended_at IS NULL))
"""
VIEW = f"""
CREATE VIEW grants AS
SELECT id AS action, attempts AS attempt, {SAME}, ended_at AS released_at FROM actions WHERE core_ids IS NOT NULL
UNION ALL SELECT action, attempt, {SAME}, released_at FROM earlier_grants
"""


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("actions", sa.Column("resource", sa.Text(), nullable=False, server_default=sa.text("''")))
    for name, kind in ADDED.items():
        op.add_column("actions", sa.Column(name, kind, nullable=True))
    held = ", ".join(f"{name} = grants.{name}" for name in ("resource", *ADDED))
    # `units` of an action that runs were those of its start.
    op.execute(f"UPDATE actions SET {held}, units = CASE WHEN ended_at IS NULL THEN grants.units ELSE actions.units END {LATEST}")
    op.execute(
        "UPDATE actions SET resource = grants.resource FROM grants WHERE action = id AND attempt = attempts AND actions.core_ids IS NULL"
    )
    op.execute(
        "DELETE FROM grants WHERE EXISTS (SELECT 1 FROM actions WHERE id = action AND attempts = attempt AND actions.core_ids IS NOT NULL)"
    )
    op.rename_table("grants", "earlier_grants")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX pk_grants RENAME TO pk_earlier_grants")
    op.execute(VIEW)


def downgrade() -> None:
    """Undo this revision."""
    latest = f"SELECT id, attempts, {SAME}, ended_at FROM actions WHERE core_ids IS NOT NULL"
    op.execute(f"INSERT INTO earlier_grants (action, attempt, {SAME}, released_at) {latest}")
    op.execute("DROP VIEW grants")
    for name in ("resource", *ADDED):
        op.drop_column("actions", name)
    op.rename_table("earlier_grants", "grants")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER INDEX pk_earlier_grants RENAME TO pk_grants")
