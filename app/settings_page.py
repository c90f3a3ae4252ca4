"""Writes `docs/settings.md` from the settings themselves: `python -m app.settings_page > docs/settings.md`."""

from __future__ import annotations

from tangram.settings import Settings


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Settings",
        "",
        "Each is an environment variable. Written by `python -m app.settings_page`; `tangram/settings.py` is the source.",
        "",
    ]
    lines += ["| variable | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = "the user's state folder" if field.default_factory else "–" if field.default in (None, (), {}) else f"`{field.default}`"
        lines.append(f"| `TANGRAM_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
