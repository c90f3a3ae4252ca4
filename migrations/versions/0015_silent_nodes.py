"""Nodes may be `silent`.

Revision 0015, after 0014.
"""

from __future__ import annotations

from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    _allow("'up', 'silent', 'lost', 'left'")


def downgrade() -> None:
    """Undo this revision; a scheduler of that version gives silent nodes up by itself."""
    op.execute("UPDATE nodes SET state = 'up' WHERE state = 'silent'")
    _allow("'up', 'lost', 'left'")


def _allow(states: str) -> None:
    with op.batch_alter_table("nodes") as batch:
        batch.drop_constraint(op.f("ck_nodes_state"), type_="check")
        batch.create_check_constraint(op.f("ck_nodes_state"), f"state IN ({states})")
