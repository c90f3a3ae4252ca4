"""Shares of cores, resizes of grants, and the order in which actions ended.

Revision 0002, after 0001.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ENDED = sa.text("ended_at IS NOT NULL")
BY_END, BY_CLASS = "ix_actions_ended_at", "ix_actions_action_class_job_ended_at"


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("grants", sa.Column("share", sa.Double(), nullable=False, server_default=sa.text("1")))
    op.add_column("grants", sa.Column("resized_at", sa.Double(), nullable=True))
    op.drop_index(BY_CLASS, "actions")
    op.create_index(BY_END, "actions", ["ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)


def downgrade() -> None:
    """Undo this revision."""
    op.drop_index(BY_END, "actions")
    op.create_index(BY_CLASS, "actions", ["action_class", "job", "ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)
    op.drop_column("grants", "resized_at")
    op.drop_column("grants", "share")
