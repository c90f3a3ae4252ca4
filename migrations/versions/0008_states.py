"""Columns of state hold only the words of their life cycles, and `ended_at` is set where the state is an end.

Revision 0008, after 0007.
"""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

ACTION_ENDS = "'succeeded', 'failed', 'timed_out', 'cancelled', 'rejected', 'lost'"
ENVIRONMENT_ENDS = "'closed', 'lost'"
CONSTRAINTS = {
    "actions": {
        "status": f"status IN ('waiting', 'running', {ACTION_ENDS})",
        "ended_at": f"(ended_at IS NOT NULL) = (status IN ({ACTION_ENDS}))",
    },
    "environments": {
        "state": f"state IN ('waiting', 'opening', 'open', 'closing', {ENVIRONMENT_ENDS})",
        "ended_at": f"(ended_at IS NOT NULL) = (state IN ({ENVIRONMENT_ENDS}))",
    },
    "nodes": {"state": "state IN ('up', 'lost', 'left')"},
    "service_instances": {"state": "state IN ('absent', 'starting', 'resident', 'evicting', 'host', 'restoring', 'failed')"},
    "action_hours": {"status": f"status IN ({ACTION_ENDS})"},
    "environment_hours": {"state": f"state IN ({ENVIRONMENT_ENDS})"},
}


def upgrade() -> None:
    """Apply this revision."""
    for table, constraints in CONSTRAINTS.items():
        with op.batch_alter_table(table) as batch:
            for name, condition in constraints.items():
                batch.create_check_constraint(op.f(f"ck_{table}_{name}"), condition)


def downgrade() -> None:
    """Undo this revision."""
    for table, constraints in CONSTRAINTS.items():
        with op.batch_alter_table(table) as batch:
            for name in constraints:
                batch.drop_constraint(op.f(f"ck_{table}_{name}"), type_="check")
