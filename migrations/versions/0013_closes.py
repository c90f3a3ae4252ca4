"""Closes of environments are nobody's fault: such rows of before say so, too.

Revision 0013, after 0012.
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply this revision."""
    op.execute("UPDATE actions SET fault = '' WHERE kind = 'cpu.close' AND fault <> ''")
    op.execute("UPDATE action_hours SET causes = '{}' WHERE kind = 'cpu.close'")


def downgrade() -> None:
    """Undo this revision: nothing to do, as what reads the revision before leaves closes out by itself."""
