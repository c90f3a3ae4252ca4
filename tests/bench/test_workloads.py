"""The generators draw what their dataclasses say, and the same again from the same seed."""

from __future__ import annotations

import io
from collections import Counter
from statistics import mean, pstdev

import pytest

from app.replay.traces import read_trace_stream, write_trace
from bench.workloads import WORKLOADS, DeepSearch, Mopd, ai_coding, deepsearch, mixed, mopd, pod_use, zipf_weights


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_draws_the_same_and_another_seed_draws_another(name: str) -> None:
    draw = WORKLOADS[name]
    assert draw(20, 7) == draw(20, 7)
    assert draw(20, 7).trajectories != draw(20, 8).trajectories


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_a_trace_like_any_other(name: str) -> None:
    drawn = WORKLOADS[name](12, 3)
    text = io.StringIO()
    write_trace(drawn, text)
    assert read_trace_stream(io.StringIO(text.getvalue())) == drawn
    assert all(action.action_class for action in drawn.actions())


def test_ai_coding_comes_to_the_published_figures_for_pods_of_one_core() -> None:
    trace = ai_coding(1280, 1)
    assert pod_use(trace, pod_cores=1) == pytest.approx(0.47, rel=0.05)
    assert mean(action.floor_s for action in trace.actions()) == pytest.approx(0.975, rel=0.05)


def test_deepsearch_calls_under_a_quota_for_its_batch_and_ends_with_the_judge() -> None:
    shape, trace = DeepSearch(), deepsearch(300, 1)
    assert trace.quotas["search"].rate_per_s == pytest.approx(300 * shape.rate_per_s)
    assert trace.quotas["search"].concurrency == 300 * shape.concurrency
    assert all([action.kind for action in each.steps[-1].actions] == ["gpu.generate"] for each in trace.trajectories)
    asked = [len(step.actions) for each in trace.trajectories for step in each.steps[:-1]]
    assert mean(asked) == pytest.approx(mean(shape.calls), rel=0.05)
    judged = [action.work_s for action in trace.actions() if action.service == "judge"]
    assert mean(judged) == pytest.approx(shape.judge_mean_s, rel=0.1)


def test_mopd_asks_different_teachers_by_zipfs_law_around_its_moment() -> None:
    shape, trace = Mopd(), mopd(3000, 1)
    when = [each.arrival_s + each.steps[0].think_s for each in trace.trajectories]
    assert mean(when) == pytest.approx(shape.think_mean_s + shape.spread_s / 2, abs=2.0)
    assert pstdev(when) == pytest.approx(shape.think_sd_s, rel=0.1)
    assert all(len({action.service for action in each.actions()}) == len(list(each.actions())) for each in trace.trajectories)
    counted = Counter(action.service for action in trace.actions())
    weights = zipf_weights(shape.teachers, shape.zipf)
    assert counted["teacher-0"] / counted.total() == pytest.approx(weights[0] / sum(weights), rel=0.1)
    assert set(counted) == set(trace.services) and len(trace.services) == shape.teachers
    assert {service.restore_s for service in trace.services.values()} == {shape.restore_s}


def test_mixed_holds_its_share_of_each_as_jobs_of_their_own() -> None:
    trace = mixed(100, 1)
    assert Counter(each.job for each in trace.trajectories) == {"ai-coding": 50, "deepsearch": 25, "mopd": 25}
    assert [each.arrival_s for each in trace.trajectories] == sorted(each.arrival_s for each in trace.trajectories)
    assert set(trace.quotas) == {"search"} and len(trace.services) == 10
