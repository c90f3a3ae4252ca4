"""How often an instance of a service came back with spoilt weights.

Revision 0009, after 0008.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.add_column("service_instances", sa.Column("wrong_answers", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Undo this revision."""
    op.drop_column("service_instances", "wrong_answers")
