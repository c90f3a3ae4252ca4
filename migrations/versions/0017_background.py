"""The part of an ACT that a command waited in the background; earlier revisions counted it as queueing.

Revision 0017, after 0016.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision; what ended before keeps its sums, with nothing in the background."""
    op.add_column("actions", sa.Column("background_s", sa.Double(), nullable=True, server_default=sa.text("0")))
    op.add_column("action_hours", sa.Column("background_s", sa.Double(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    """Undo this revision."""
    for table in ("actions", "action_hours"):
        op.execute(f"UPDATE {table} SET queue_s = queue_s + background_s WHERE background_s > 0")
        op.drop_column(table, "background_s")
