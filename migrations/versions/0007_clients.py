"""The client that an environment goes with, and its last use.

Revision 0007, after 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("environments", sa.Column("client", sa.Text(), nullable=True))
    op.add_column("environments", sa.Column("used_at", sa.Double(), nullable=True))


def downgrade() -> None:
    """Undo this revision."""
    op.drop_column("environments", "used_at")
    op.drop_column("environments", "client")
