"""The demo: the bundled rollouts, live, under what frameworks do today and under this scheduler.

Both replays run the same commands on the same cores with the same services; only the policy differs. Each has a
state folder of its own, so that their journals can be looked at afterwards. Where other programs kept the machine busy, both are run again,
in the other order, and the calmer pair counts.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli.reporting import page_module, read_report, write_page
from app.journal.database import open_engine
from app.journal.figures import Selection, act_report
from app.journal.runs import load_run
from app.local.processes import busy_elsewhere_s
from app.local.stack import cores_here
from app.replay.replay_command import Progress, ReplayOptions, alone, quotas_toml, replay_live
from app.replay.traces import BUNDLED, read_trace
from app.tiny_models import make_services
from scheduler.sim.trace import Trace
from tangram.errors import TangramError
from tangram.settings import Settings

POLICIES = ("static:1", "elastic")
DEMO_CELLS = 2
MOST_OTHERS = 0.2
"""The part of this machine's cores that other programs may keep busy; with more, the figures are as much theirs as the policies'."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The comparison: a column per policy, rows of formatted cells, a verdict in words, where things are, and the figures."""

    columns: tuple[str, ...]
    rows: list[tuple[str, tuple[str, ...]]]
    verdict: str
    where: tuple[str, ...]
    document: dict[str, Any]


def run_demo(
    state_dir: Path,
    speed: float,
    progress: Progress,
    say: Callable[[str], None],
    *,
    once: bool = False,
) -> DemoResult:
    """Run both replays and compare them; `once` makes no second pair of them.

    Without torch the models are stand-ins, whose answers take as long as the recorded ones. Without the extra `report` there is no page.
    """
    state_dir = state_dir.absolute()
    trace = read_trace(BUNDLED)
    services_file = _services(trace, state_dir, say)
    try:
        page_module()
        page: Path | None = state_dir / "report.html"
    except TangramError as error:
        say(f"{error}; figures are printed and written without it")
        page = None

    def replay(policy: str, folder: str) -> dict[str, Any]:
        say(f"replaying {len(trace.trajectories)} recorded rollouts live under {policy} …")
        # Nothing of a surrounding deployment is used: the demo is a stack of its own.
        settings = alone(Settings(), state_dir / folder).model_copy(update={"services_file": services_file})
        began, busy_before = time.monotonic(), busy_elsewhere_s()
        with progress(policy) as begin:
            options = ReplayOptions(policy=policy, speed=speed, gpus=DEMO_CELLS)
            result = replay_live(trace, BUNDLED, options, settings, begin, say)
        wall_s = time.monotonic() - began
        machine = {"wall_s": wall_s, "others_cores": (busy_elsewhere_s() - busy_before) / wall_s}
        return {**result.document, **_core_seconds(result.document["database"], result.document["run"]), **machine}

    return compare(pair_of(replay, say, once=once), state_dir, page)


def pair_of(replay: Callable[[str, str], dict[str, Any]], say: Callable[[str], None], *, once: bool = False) -> dict[str, dict[str, Any]]:
    """Return the figures of both policies. `replay` makes those of one, in a folder of this name."""
    found = {policy: replay(policy, policy.replace(":", "-")) for policy in POLICIES}
    if once or _others(found) <= MOST_OTHERS * cores_here():
        return found
    say(f"other programs kept {_others(found):.1f} of {cores_here()} cores busy; both again, in the other order …")
    try:
        again = {policy: replay(policy, f"{policy.replace(':', '-')}-again") for policy in reversed(POLICIES)}
    except TangramError as error:
        say(f"{error}; the first pair counts")
        return found
    return min(found, {policy: again[policy] for policy in POLICIES}, key=_others)


def _others(found: dict[str, dict[str, Any]]) -> float:
    """Return how many cores other programs kept busy during a pair of replays, the worse of both."""
    return float(max(replayed["others_cores"] for replayed in found.values()))


def _services(trace: Trace, state_dir: Path, say: Callable[[str], None]) -> Path | None:
    """Return the services file of the demo; None where torch is not installed, so that the replay makes stand-ins."""
    models = tiny_services(state_dir, say)
    if models is None:
        say("stand-ins answer for the models")
        return None
    services_file = models.with_name("demo.toml")
    services_file.write_text(models.read_text(encoding="utf-8") + quotas_toml(trace), encoding="utf-8")
    return services_file


def tiny_services(state_dir: Path, say: Callable[[str], None]) -> Path | None:
    """Make the tiny models that demo and embedded stack serve; None where torch is not installed, which is said."""
    if importlib.util.find_spec("torch") is None:
        say("torch is not installed, so there are no tiny models; `pip install 'arl-tangram-server[gpu]'` brings them")
        return None
    folder = state_dir / "models"
    if not (folder / "services.toml").exists():
        say(f"making two tiny models in {folder} …")
    return make_services(folder)


def _core_seconds(database_url: str, run_id: str) -> dict[str, float]:
    engine = open_engine(database_url)
    report = act_report(engine, Selection.of_run(load_run(engine, run_id)))
    engine.dispose()
    return {
        "core_s_reserved": report.pod_or_grant_core_s,
        "core_s_used": report.total.core_s_used,
    }


_ROWS: tuple[tuple[str, str, str], ...] = (
    ("mean ACT", "mean_act", "{:.3f} s"),
    ("p95 ACT", "p95_act", "{:.3f} s"),
    ("mean queueing", "mean_queue", "{:.3f} s"),
    ("mean background", "mean_background", "{:.3f} s"),
    ("mean execution", "mean_execution", "{:.3f} s"),
    ("mean overhead", "mean_overhead", "{:.3f} s"),
    ("step duration", "step_duration", "{:.1f} s"),
    ("core-seconds reserved", "core_s_reserved", "{:.1f}"),
    ("core-seconds used", "core_s_used", "{:.1f}"),
    ("actions", "actions", "{}"),
    ("not succeeded", "failed", "{}"),
)


def _times(before: float, after: float, less: str, more: str) -> str:
    """Say by how much a figure has changed, e.g. "2.1 × lower"; on a busy machine it may be the other way round."""
    return f"{before / after:.1f} × {less}" if after <= before else f"{after / before:.1f} × {more}"


def compare(found: dict[str, dict[str, Any]], state_dir: Path, page: Path | None) -> DemoResult:
    """Return the comparison of a pair of replays, and write its figures and, with `page`, its report."""
    rows = [(name, tuple(form.format(found[policy][key]) for policy in POLICIES)) for name, key, form in _ROWS]
    before, after = (found[policy] for policy in POLICIES)
    if not all(found[policy]["mean_act"] and found[policy]["core_s_reserved"] for policy in POLICIES):
        raise TangramError(f"the demo's actions did not run: see the logs in {state_dir}")
    act, step, cores = (
        _times(before[key], after[key], *words)
        for key, words in (
            ("mean_act", ("lower", "higher")),
            ("step_duration", ("shorter", "longer")),
            ("core_s_reserved", ("fewer", "more")),
        )
    )
    verdict = f"Compared with {POLICIES[0]}, {POLICIES[1]} has a mean ACT {act}, a step {step}, and {cores} core-seconds reserved."
    others, all_cores = _others(found), cores_here()
    if others > MOST_OTHERS * all_cores:
        busy = f"other programs kept {others:.1f} of {all_cores} cores busy in this pair of runs"
        verdict += f" But {busy}, so these figures say little: repeat it when they are idle."
    if failed := max(found[policy]["failed"] for policy in POLICIES):
        verdict += f" But {failed} of {after['actions']} actions did not succeed: see the logs in {state_dir}."
    figures = state_dir / "report.json"
    figures.write_text(json.dumps(found, indent=2), encoding="utf-8")
    journals = [found[policy]["database"].removeprefix("sqlite:///") for policy in POLICIES]
    where = [f"journal of {policy}: {journal}" for journal, policy in zip(journals, POLICIES, strict=True)]
    where.append(f"figures: {figures}")
    if page is not None:
        runs = [f"{journal}:{found[policy]['run']}" for journal, policy in zip(journals, POLICIES, strict=True)]
        write_page(read_report(Settings(), runs[1], against=runs[0]), page)
        where.append(f"report of both, compared, to be opened in a browser: {page}")
    return DemoResult(POLICIES, rows, verdict, tuple(where), found)
