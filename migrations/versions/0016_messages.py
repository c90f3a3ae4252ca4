"""Messages have a table of their own: a row that is removed leaves its room to others, a column that is emptied does not.

Revision 0016, after 0015. Headers of before stay whole.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "messages",
        sa.Column("action", sa.Text(), primary_key=True),
        sa.Column("message", sa.Text(), nullable=False),
    )
    op.execute("INSERT INTO messages (action, message) SELECT id, message FROM actions WHERE message IS NOT NULL")
    op.drop_column("actions", "message")


def downgrade() -> None:
    """Undo this revision. What headers no longer say of an action comes back from its columns."""
    op.add_column("actions", sa.Column("message", sa.Text(), nullable=True))
    op.execute("UPDATE actions SET message = (SELECT message FROM messages WHERE messages.action = actions.id)")
    op.drop_table("messages")
    connection = op.get_bind()
    columns = ("kind", "job", "trajectory", "environment", "service")
    actions = sa.table("actions", *map(sa.column, ("id", *columns)), sa.column("header", JSON))
    for row in connection.execute(sa.select(actions)).all():
        whole = {name: value for name in columns if (value := getattr(row, name)) is not None} | row.header
        connection.execute(sa.update(actions).where(actions.c.id == row.id).values(header=whole))
