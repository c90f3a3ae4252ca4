"""Instances of services.

Revision 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "service_instances",
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("service", sa.Text(), nullable=False),
        sa.Column("cells", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("memory_mb", sa.Double(), nullable=False),
        sa.Column("host_mb", sa.Double(), nullable=False),
        sa.Column("starts", sa.Integer(), nullable=False),
        sa.Column("restores", sa.Integer(), nullable=False),
        sa.Column("evictions", sa.Integer(), nullable=False),
        sa.Column("leaks", sa.Integer(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("node", "service", "cells", name="pk_service_instances"),
    )


def downgrade() -> None:
    """Undo this revision."""
    op.drop_table("service_instances")
