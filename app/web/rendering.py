"""The templates, with the filters that they use."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined

from app.journal.listing import ACTION_STATES, ENVIRONMENT_STATES
from app.web import words

_FILTERS = (
    words.seconds,
    words.clock,
    words.number,
    words.percent,
    words.megabytes,
    words.address,
    words.state_class,
    words.quota_state,
    words.draining,
)


def make_templates() -> Environment:
    """Return the environment of the templates; everything that they print is escaped."""
    templates = Environment(
        loader=PackageLoader("app.web"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters.update({one.__name__: one for one in _FILTERS})
    templates.globals.update(ACTION_STATES=ACTION_STATES, ENVIRONMENT_STATES=ENVIRONMENT_STATES)
    return templates
