"""The page's pure modules, run where they will run: bounded series, the model of a job, ticks, formats."""

from typing import Any

import pytest

from tests.browser.conftest import Visitor

pytestmark = pytest.mark.browser


def run(visitor: Visitor, module: str, code: str) -> Any:
    """What `code`, a function of the module, returns."""
    return visitor.page.evaluate(
        f"async () => {{ const run = {code}; return run(await import('/dashboard/assets/{module}')); }}"
    )


def test_a_long_series_is_bounded_and_its_sums_are_exact(visitor: Visitor) -> None:
    kept, total, count, low, high, last = run(
        visitor,
        "series.js",
        """({ Series }) => {
          const series = new Series({ capacity: 256 });
          for (let step = 1; step <= 100_000; step += 1) series.add(step, step % 1000);
          const points = series.points();
          return [
            points.length,
            points.reduce((sum, { mean, count }) => sum + mean * count, 0),
            points.reduce((sum, { count }) => sum + count, 0),
            Math.min(...points.map(({ min }) => min)),
            Math.max(...points.map(({ max }) => max)),
            points.at(-1).step,
          ];
        }""",
    )
    assert 128 <= kept <= 256
    assert total == pytest.approx(sum(step % 1000 for step in range(1, 100_001)))
    assert (count, low, high, last) == (100_000, 0, 999, 100_000)


def test_steps_that_come_again_replace_what_was_undone(visitor: Visitor) -> None:
    points = run(
        visitor,
        "series.js",
        """({ Series }) => {
          const series = new Series();
          for (let step = 1; step <= 10; step += 1) series.add(step, 1);
          for (let step = 8; step <= 9; step += 1) series.add(step, 2);
          return series.points().map(({ step, mean }) => [step, mean]);
        }""",
    )
    assert points == [[step, 1] for step in range(1, 8)] + [[8, 2], [9, 2]]


def test_the_same_entries_twice_count_once(visitor: Visitor) -> None:
    steps, events, generation, ranks = run(
        visitor,
        "job_model.js",
        """({ JobModel }) => {
          const model = new JobModel();
          model.applyJob({ version: 1, step: 0, spec: { global_batch: 4, sequence_length: 8 } });
          const report = (seq, rank, step, generation) =>
            ({ seq, rank, step, generation, loss: 1, step_s: 0.5, tokens: 16 });
          const entries = [report(1, 0, 1, 1), report(2, 1, 1, 1), report(4, 0, 2, 2)];
          const event = { id: 3, kind: "resize", data: { at_step: 1, old_workers: 2, new_workers: 1 } };
          for (let time = 0; time < 2; time += 1) {
            entries.forEach((entry) => model.applyReport(entry));
            model.applyEvent(event);
          }
          return [model.loss.length, model.events.length, model.generation, model.reports.length];
        }""",
    )
    assert (steps, events, generation, ranks) == (2, 1, 2, 1)


def test_ticks_are_round_and_inside(visitor: Visitor) -> None:
    assert run(visitor, "charts/scale.js", "({ ticks }) => ticks(0.3, 9.7, 5)") == [2, 4, 6, 8]
    assert run(visitor, "charts/scale.js", "({ ticks }) => ticks(3, 3, 5)") == [3]
    assert run(visitor, "charts/scale.js", "({ ticks }) => ticks(0, 100, 4, { base: 2 })") == [0, 32, 64, 96]


FORMATS = {
    "bytes(0)": "0 B",
    "bytes(1536)": "1.50 KiB",
    "bytes(1048575)": "1.00 MiB",
    "bytes(-2048)": "\N{MINUS SIGN}2.00 KiB",
    "duration(0.0123)": "12.3 ms",
    "duration(75)": "1 min 15 s",
    "duration(59.97)": "1 min",
    "compact(12345)": "12.3k",
    "compact(999.9)": "1.00k",
    "decimal(0.00012345)": "1.234e-4",
    "decimal(NaN)": "\N{EN DASH}",
    "decimal(null)": "\N{EN DASH}",
    "bare('2.50k')": "2.5k",
    "bare('100 ms')": "100 ms",
    "age(100, 190)": "1 min ago",
}


def test_formats(visitor: Visitor) -> None:
    calls = ", ".join(f"format.{call}" for call in FORMATS)
    assert run(visitor, "format.js", f"(format) => [{calls}]") == list(FORMATS.values())
