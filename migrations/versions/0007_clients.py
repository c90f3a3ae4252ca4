"""The client that an environment goes with, and its last use.

Revision 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ENDED = sa.text("ended_at IS NOT NULL")


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("environments", sa.Column("client", sa.Text(), nullable=True))
    op.add_column("environments", sa.Column("used_at", sa.Double(), nullable=True))
    op.create_index("ix_environments_ended_at", "environments", ["ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)


def downgrade() -> None:
    """Undo this revision."""
    op.drop_index("ix_environments_ended_at", "environments")
    op.drop_column("environments", "used_at")
    op.drop_column("environments", "client")
