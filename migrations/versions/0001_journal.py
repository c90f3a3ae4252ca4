"""The journal: jobs, actions, grants, environments, nodes, services, runs, leases.

Revision 0001, the first.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
NOT_ENDED, ENDED = sa.text("ended_at IS NULL"), sa.text("ended_at IS NOT NULL")


def upgrade() -> None:
    """Apply this revision."""
    op.create_table(
        "jobs",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_jobs"),
    )
    _create_actions()
    op.create_table(
        "grants",
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("resource", sa.Text(), nullable=False),
        sa.Column("units", sa.Integer(), nullable=False),
        sa.Column("core_ids", JSON, nullable=False),
        sa.Column("cell_ids", JSON, nullable=False),
        sa.Column("granted_at", sa.Double(), nullable=False),
        sa.Column("released_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("action", "attempt", name="pk_grants"),
    )
    _create_fleet()
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("trace", sa.Text(), nullable=False),
        sa.Column("jobs", JSON, nullable=False),
        sa.Column("options", JSON, nullable=False),
        sa.Column("summary", JSON, nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_runs"),
    )
    op.create_index("ix_runs_started_at", "runs", ["started_at"])
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )


def downgrade() -> None:
    """Undo this revision."""
    for table in ("leases", "runs", "services", "nodes", "environments", "grants", "actions", "jobs"):
        op.drop_table(table)


def _create_actions() -> None:
    op.create_table(
        "actions",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("trajectory", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("action_class", sa.Text(), nullable=False),
        sa.Column("service", sa.Text(), nullable=True),
        sa.Column("quota", sa.Text(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("header", JSON, nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("received_at", sa.Double(), nullable=False),
        sa.Column("granted_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("units", sa.Integer(), nullable=True),
        sa.Column("unit_s", sa.Double(), nullable=True),
        sa.Column("queue_s", sa.Double(), nullable=True),
        sa.Column("overhead_s", sa.Double(), nullable=True),
        sa.Column("execution_s", sa.Double(), nullable=True),
        sa.Column("act_s", sa.Double(), nullable=True),
        sa.Column("cpu_s", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_actions"),
    )
    op.create_index("ix_actions_unfinished", "actions", ["position"], sqlite_where=NOT_ENDED, postgresql_where=NOT_ENDED)
    op.create_index("ix_actions_trajectory", "actions", ["trajectory"])
    op.create_index("ix_actions_job_ended_at", "actions", ["job", "ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)
    by_class = ["action_class", "job", "ended_at"]
    op.create_index("ix_actions_action_class_job_ended_at", "actions", by_class, sqlite_where=ENDED, postgresql_where=ENDED)


def _create_fleet() -> None:
    op.create_table(
        "environments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("trajectory", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("pod_cores", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("opened_at", sa.Double(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_environments"),
    )
    op.create_index("ix_environments_unfinished", "environments", ["created_at"], sqlite_where=NOT_ENDED, postgresql_where=NOT_ENDED)
    op.create_index("ix_environments_job", "environments", ["job"])
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("description", JSON, nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_nodes"),
    )
    op.create_table(
        "services",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("description", JSON, nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_services"),
    )
