"""The shard that an action, an environment and a node belong to.

Revision 0022, after 0021.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

TABLES = ("actions", "environments", "nodes")


def upgrade() -> None:
    """Apply this revision."""
    for table in TABLES:
        op.add_column(table, sa.Column("shard", sa.Integer(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    """Undo this revision."""
    for table in TABLES:
        op.drop_column(table, "shard")
