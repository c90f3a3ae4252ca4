"""Why each action ended, and whose fault that was; owners and leases of environments.

Revision 0011, after 0010.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

JSON = sa.JSON(none_as_null=True).with_variant(JSONB(none_as_null=True), "postgresql")
CAUSES = (
    "'exit', 'timeout', 'out_of_memory', 'disk_limit', 'error', 'node_lost', 'environment_lost', 'end_unknown', 'sandbox_failed', "
    "'open_timeout', 'engine_failed', 'engine_timeout', 'service_gone', 'api_failed', 'api_timeout', 'worker_failed', 'missing_tool', "
    "'result_lost', 'set_aside', 'stack_unreachable', 'queue_timeout', 'queue_full', 'impossible', 'bad_input', 'image_missing', "
    "'environment_closed', 'lease_over', 'cancelled', 'client_gone'"
)
CONSTRAINTS = {"cause": f"cause IN ('', {CAUSES})", "fault": "fault IN ('', 'program', 'infrastructure', 'caller')"}

INFRA_FAILED = sa.text("fault = 'infrastructure'")


def upgrade() -> None:
    """Apply this revision."""
    with op.batch_alter_table("actions") as batch:
        for name, condition in CONSTRAINTS.items():
            batch.add_column(sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''")))
            batch.create_check_constraint(op.f(f"ck_actions_{name}"), condition)
    op.create_index("ix_actions_infra_failed", "actions", ["cause"], sqlite_where=INFRA_FAILED, postgresql_where=INFRA_FAILED)
    for name in ("cause", "owner"):
        op.add_column("environments", sa.Column(name, sa.Text(), nullable=False, server_default=sa.text("''")))
    op.add_column("environments", sa.Column("ends_at", sa.Double(), nullable=True))
    op.add_column("action_hours", sa.Column("causes", JSON, nullable=False, server_default=sa.text("'{}'")))


def downgrade() -> None:
    """Undo this revision."""
    op.drop_column("action_hours", "causes")
    for name in ("ends_at", "owner", "cause"):
        op.drop_column("environments", name)
    op.drop_index("ix_actions_infra_failed", "actions")
    with op.batch_alter_table("actions") as batch:
        for name in CONSTRAINTS:
            batch.drop_constraint(op.f(f"ck_actions_{name}"), type_="check")
            batch.drop_column(name)
