"""Environments may end by the cause `memory_short`.

Revision 0018, after 0017.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

CAUSES = (
    "'exit', 'timeout', 'out_of_memory', 'disk_limit', 'error', 'node_lost', 'environment_lost', 'end_unknown', 'sandbox_failed', "
    "'open_timeout', 'engine_failed', 'engine_timeout', 'service_gone', 'api_failed', 'api_timeout', 'worker_failed', 'missing_tool', "
    "'result_lost', 'set_aside', 'stack_unreachable', 'queue_timeout', 'queue_full', 'impossible', 'bad_input', 'image_missing', "
    "'environment_closed', 'lease_over', 'cancelled', 'client_gone', 'no_answer'"
)


def upgrade() -> None:
    """Apply this revision."""
    _allow(f"'memory_short', {CAUSES}")


def downgrade() -> None:
    """Undo this revision; what ended by the new cause then counts as any other loss of an environment."""
    op.execute("UPDATE actions SET cause = 'environment_lost' WHERE cause = 'memory_short'")
    _allow(CAUSES)


def _allow(causes: str) -> None:
    with op.batch_alter_table("actions") as batch:
        batch.drop_constraint(op.f("ck_actions_cause"), type_="check")
        batch.create_check_constraint(op.f("ck_actions_cause"), f"cause IN ('', {causes})")
