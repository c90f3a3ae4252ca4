"""The journal: jobs, actions, grants, environments, nodes, services, runs, figures by the hour, leases, tokens.

Revision 0016, the first. Earlier ones led from one unreleased state of the tables to the next.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0016"
down_revision = None
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
NOT_ENDED, ENDED = sa.text("ended_at IS NULL"), sa.text("ended_at IS NOT NULL")
INFRA_FAILED = sa.text("fault = 'infrastructure'")
ACTION_ENDS = "'succeeded', 'failed', 'timed_out', 'cancelled', 'rejected', 'lost'"
ENVIRONMENT_ENDS = "'closed', 'lost'"
INSTANCE_STATES = "'absent', 'starting', 'resident', 'evicting', 'host', 'restoring', 'failed'"
CAUSES = (
    "'exit', 'timeout', 'out_of_memory', 'disk_limit', 'error', 'node_lost', 'environment_lost', 'end_unknown', 'sandbox_failed', "
    "'open_timeout', 'engine_failed', 'engine_timeout', 'service_gone', 'api_failed', 'api_timeout', 'worker_failed', 'missing_tool', "
    "'result_lost', 'set_aside', 'stack_unreachable', 'queue_timeout', 'queue_full', 'impossible', 'bad_input', 'image_missing', "
    "'environment_closed', 'lease_over', 'cancelled', 'client_gone', 'no_answer'"
)


def upgrade() -> None:
    """Apply this revision."""
    _create_actions()
    _create_grants()
    _create_environments()
    _create_nodes()
    _create_runs()
    _create_hours()
    _create_shared()


def downgrade() -> None:
    """Undo this revision."""
    tables = ("jobs", "actions", "messages", "grants", "environments", "nodes", "services", "service_instances", "runs")
    for table in (*tables, "action_hours", "environment_hours", "failed_messages", "leases", "gateway_tokens"):
        op.drop_table(table)


def _create_actions() -> None:
    op.create_table(
        "jobs",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_jobs"),
    )
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
        sa.Column("cause", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("fault", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.CheckConstraint(f"status IN ('waiting', 'running', {ACTION_ENDS})", name=op.f("ck_actions_status")),
        sa.CheckConstraint(f"(ended_at IS NOT NULL) = (status IN ({ACTION_ENDS}))", name=op.f("ck_actions_ended_at")),
        sa.CheckConstraint(f"cause IN ('', {CAUSES})", name=op.f("ck_actions_cause")),
        sa.CheckConstraint("fault IN ('', 'program', 'infrastructure', 'caller')", name=op.f("ck_actions_fault")),
        sa.PrimaryKeyConstraint("id", name="pk_actions"),
    )
    op.create_index("ix_actions_ended_at", "actions", ["ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)
    op.create_index("ix_actions_infra_failed", "actions", ["cause"], sqlite_where=INFRA_FAILED, postgresql_where=INFRA_FAILED)
    op.create_index("ix_actions_job_ended_at", "actions", ["job", "ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)
    op.create_index("ix_actions_trajectory", "actions", ["trajectory"])
    op.create_index("ix_actions_unfinished", "actions", ["position"], sqlite_where=NOT_ENDED, postgresql_where=NOT_ENDED)


def _create_grants() -> None:
    op.create_table(
        "messages",
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("action", name="pk_messages"),
    )
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
        sa.Column("resized_at", sa.Double(), nullable=True),
        sa.Column("background", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.PrimaryKeyConstraint("action", "attempt", name="pk_grants"),
    )


def _create_environments() -> None:
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
        sa.Column("client", sa.Text(), nullable=True),
        sa.Column("used_at", sa.Double(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("owner", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.Column("ends_at", sa.Double(), nullable=True),
        sa.CheckConstraint(f"(ended_at IS NOT NULL) = (state IN ({ENVIRONMENT_ENDS}))", name=op.f("ck_environments_ended_at")),
        sa.CheckConstraint(f"state IN ('waiting', 'opening', 'open', 'closing', {ENVIRONMENT_ENDS})", name=op.f("ck_environments_state")),
        sa.PrimaryKeyConstraint("id", name="pk_environments"),
    )
    op.create_index("ix_environments_ended_at", "environments", ["ended_at"], sqlite_where=ENDED, postgresql_where=ENDED)
    op.create_index("ix_environments_job", "environments", ["job"])
    op.create_index("ix_environments_unfinished", "environments", ["created_at"], sqlite_where=NOT_ENDED, postgresql_where=NOT_ENDED)


def _create_nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("description", JSON, nullable=False),
        sa.Column("joined_at", sa.Double(), nullable=True),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("draining", sa.Boolean(), nullable=False, server_default=sa.false()),
        sa.CheckConstraint("state IN ('up', 'silent', 'lost', 'left')", name=op.f("ck_nodes_state")),
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
        sa.Column("wrong_answers", sa.Integer(), nullable=False, server_default="0"),
        sa.CheckConstraint(f"state IN ({INSTANCE_STATES})", name=op.f("ck_service_instances_state")),
        sa.PrimaryKeyConstraint("node", "service", "cells", name="pk_service_instances"),
    )


def _create_runs() -> None:
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


def _create_hours() -> None:
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
        sa.Column("causes", JSON, nullable=False, server_default=sa.text("'{}'")),
        sa.CheckConstraint(f"status IN ({ACTION_ENDS})", name=op.f("ck_action_hours_status")),
        sa.PrimaryKeyConstraint("job", "kind", "action_class", "hour", "status", name="pk_action_hours"),
    )
    op.create_table(
        "environment_hours",
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("environments", sa.BigInteger(), nullable=False),
        sa.Column("pod_core_s", sa.Double(), nullable=False),
        sa.CheckConstraint(f"state IN ({ENVIRONMENT_ENDS})", name=op.f("ck_environment_hours_state")),
        sa.PrimaryKeyConstraint("job", "hour", "state", name="pk_environment_hours"),
    )


def _create_shared() -> None:
    op.create_table(
        "failed_messages",
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("traceback", sa.Text(), nullable=False),
        sa.Column("failed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("message", name="pk_failed_messages"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "gateway_tokens",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("job", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("hash", name="pk_gateway_tokens"),
    )
    op.create_index("ix_gateway_tokens_job", "gateway_tokens", ["job"])
