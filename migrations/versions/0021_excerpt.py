"""What is kept of a command that has ended.

Revision 0021, after 0020.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("actions", sa.Column("excerpt", JSON, nullable=True))


def downgrade() -> None:
    """Undo this revision."""
    op.drop_column("actions", "excerpt")
