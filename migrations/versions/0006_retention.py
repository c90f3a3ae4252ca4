"""Figures by the hour of what retention removes.

Revision 0006, after 0005.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
ENDED = sa.text("ended_at IS NOT NULL")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "action_hours",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("action_class", sa.Text(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("actions", sa.BigInteger(), nullable=False),
        sa.Column("act_s", sa.Double(), nullable=False),
        sa.Column("queue_s", sa.Double(), nullable=False),
        sa.Column("overhead_s", sa.Double(), nullable=False),
        sa.Column("execution_s", sa.Double(), nullable=False),
        sa.Column("cpu_s", sa.Double(), nullable=False),
        sa.Column("core_s", sa.Double(), nullable=False),
        sa.Column("cell_s", sa.Double(), nullable=False),
        sa.Column("histograms", JSON, nullable=False),
        sa.PrimaryKeyConstraint("job", "kind", "action_class", "hour", "status", name="pk_action_hours"),
    )
    op.create_table(
        "environment_hours",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("environments", sa.BigInteger(), nullable=False),
        sa.Column("pod_core_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("job", "hour", "state", name="pk_environment_hours"),
    )
    op.create_index("ix_environments_ended_at", "environments", ["ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)


def downgrade() -> None:
    """Undo this revision."""
    op.drop_index("ix_environments_ended_at", "environments")
    op.drop_table("environment_hours")
    op.drop_table("action_hours")
