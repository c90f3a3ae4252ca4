"""Grants in the background, in place of shares of cores.

Revision 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("grants", sa.Column("background", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.drop_column("grants", "share")


def downgrade() -> None:
    """Undo this revision."""
    op.add_column("grants", sa.Column("share", sa.Double(), nullable=False, server_default=sa.text("1")))
    op.drop_column("grants", "background")
