"""The commands that look after the journal: its tables, and the tokens of callers."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli import output
from app.cli.common import database, make_state_dir, tokens
from tangram.settings import Settings


@database.command("upgrade")
def db_upgrade() -> None:
    """Bring the journal's tables up to date.

    A SQLite file that is missing is made. Its address is printed on standard error.
    """
    from app.journal.database import shown, sqlite_url
    from app.journal.migrating import upgrade

    settings = Settings()
    if settings.database_url is None:
        make_state_dir(settings.state_dir)
    url = settings.database_url or sqlite_url(settings.state_dir / "tangram.sqlite")
    if upgrade(url):
        output.note(f"made a new journal: {shown(url)}")


@tokens.command("new")
def token_new(job: Annotated[str, typer.Option(help="The job that callers with this token act for.")]) -> None:
    """Make a token and print it; it is shown this once."""
    from app.cli.state import open_journal
    from app.gateway.tokens import make_token

    print(make_token(open_journal(Settings()), job))


@tokens.command("revoke")
def token_revoke(job: Annotated[str, typer.Option(help="The job whose tokens no longer count.")]) -> None:
    """Revoke all tokens of a job and print how many there were; gateways notice within seconds."""
    from app.cli.state import open_journal
    from app.gateway.tokens import revoke_tokens

    print(count := revoke_tokens(open_journal(Settings()), job))
    output.note(f"tokens of {job} that counted until now: {count}")
