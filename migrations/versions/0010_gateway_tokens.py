"""Tokens of the gateway.

Revision 0010, after 0009.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "gateway_tokens",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("hash", name=op.f("pk_gateway_tokens")),
    )
    op.create_index("ix_gateway_tokens_job", "gateway_tokens", ["job"])


def downgrade() -> None:
    """Undo this revision."""
    op.drop_index("ix_gateway_tokens_job", table_name="gateway_tokens")
    op.drop_table("gateway_tokens")
