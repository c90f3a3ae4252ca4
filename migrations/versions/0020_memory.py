"""What the environment of an action held in memory, where its worker grants memory by action.

Revision 0020, after 0019.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

ADDED = ("memory_mb", "resident_mb")


def upgrade() -> None:
    """Apply this revision."""
    for name in ADDED:
        op.add_column("actions", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    """Undo this revision."""
    for name in ADDED:
        op.drop_column("actions", name)
