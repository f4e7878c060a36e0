"""The page of one job: curves, memory, ranks, events, controls, and the stream that keeps it going."""

import json
import re

import pytest
from playwright.sync_api import Locator, expect

from service.fake_cluster import FakeCluster
from service.jobs import Job
from tests.browser.conftest import Service, Visitor, wait_until

pytestmark = pytest.mark.browser

MEASURED = {
    "parameters": 4000,
    "gradients": 2000,
    "optimizer_states": 8000,
    "communication_buffers": 1000,
    "activations": 3000,
    "unattributed": 500,
}
"""What every rank of the fake cluster reports; the prediction is the same without the last."""


@pytest.fixture
def job(service: Service, visitor: Visitor) -> Job:
    """A job at step 20, on the screen."""
    job = service.submit()
    service.train(job, 20)
    visitor.open(f"jobs/{job.id}")
    expect(visitor.page.locator("#connection")).to_have_text("live")
    return job


def chart(visitor: Visitor, title: str) -> Locator:
    return visitor.page.get_by_role("group", name=re.compile(f"^{title}"))


def figure(visitor: Visitor, name: str) -> Locator:
    return visitor.page.locator(".figures .figure").filter(has=visitor.page.locator("dt", has_text=name))


def points(visitor: Visitor, title: str) -> int:
    """How many points the chart's line goes through."""
    path = chart(visitor, title).locator("path.line").get_attribute("d") or ""
    return len(re.findall("[ML]", path))


def test_the_curves_show_every_step(job: Job, visitor: Visitor) -> None:
    assert [points(visitor, title) for title in ("Loss", "Throughput", "Step time")] == [20, 20, 20]
    told = chart(visitor, "Loss").locator("desc").text_content()
    assert told == "Loss from step 1 to 20: first 4.000, newest 0.2000, smallest 0.2000, largest 4.000."
    expect(chart(visitor, "Throughput").locator("output")).to_have_text("2.56k")
    expect(chart(visitor, "Step time").locator("output")).to_have_text("100 ms")


def test_a_curve_is_read_with_the_keyboard_and_as_a_table(job: Job, visitor: Visitor) -> None:
    cursor = chart(visitor, "Loss").get_by_role("slider")
    cursor.focus()
    visitor.page.keyboard.press("Home")
    expect(cursor).to_have_attribute("aria-valuetext", "step 1: 4.000")
    visitor.page.keyboard.press("ArrowRight")
    expect(cursor).to_have_attribute("aria-valuetext", "step 2: 2.000")
    expect(chart(visitor, "Loss").locator(".tip")).to_contain_text("Step 2")
    chart(visitor, "Loss").get_by_text("Values as a table").click()
    rows = chart(visitor, "Loss").get_by_role("row")
    expect(rows).to_have_count(21)
    expect(rows.nth(4)).to_have_text("41.000")


def test_each_rank_shows_its_memory_against_the_prediction(job: Job, visitor: Visitor) -> None:
    ranks = visitor.page.locator(".rank-memory")
    expect(ranks).to_have_count(2)
    for rank in (0, 1):
        bars = ranks.nth(rank)
        assert drawn(bars.locator(".bar-measured")) == MEASURED
        assert drawn(bars.locator(".bar-predicted")) == MEASURED | {"unattributed": None}
        expect(bars).to_contain_text(f"rank {rank}")
        expect(bars.locator(".rank-total")).to_have_text("18.1 KiBpredicted 17.6 KiB")
    label = ranks.first.get_by_role("img").first
    expect(label).to_have_attribute("aria-label", re.compile("Rank 0, measured: parameters 3.91 KiB, "))
    widths = [
        float(part.get_attribute("width") or 0) for part in ranks.first.locator(".bar-measured rect").all()
    ]
    assert sum(widths) == pytest.approx(1000 / 1.02)
    assert widths[0] / widths[1] == pytest.approx(2)


def drawn(bar: Locator) -> dict[str, int | None]:
    found: dict[str, int | None] = dict.fromkeys(MEASURED)
    for part in bar.locator("rect").all():
        found[part.get_attribute("data-category") or ""] = int(part.get_attribute("data-bytes") or 0)
    return found


def test_the_table_of_ranks_has_bytes_by_kind_and_transport_and_seconds(job: Job, visitor: Visitor) -> None:
    table = visitor.page.get_by_role("region", name="Ranks at their newest step")
    row = table.locator("tr[data-rank='1']")
    cells = row.locator("th, td").all_text_contents()
    sent, through, spent = ["1000 B", "1000 B", "10 B"], ["1.47 KiB", "500 B"], ["40 ms", "60 ms"]
    assert cells == ["1", "w1", "20", "100 ms", "1.28k", "19.5 KiB", *sent, *through, *spent]
    groups, names = table.locator("thead tr").all()
    spans = [(each.text_content(), each.get_attribute("colspan")) for each in groups.locator("th").all()]
    assert spans == [("bytes sent", "3"), ("of them through", "2"), ("time by phase", "2")]
    named = names.locator("th").all_text_contents()[6:]
    assert named == ["reduce", "gather", "control", "shared memory", "network", "forward", "backward"]


def test_a_new_report_appears_without_a_reload(job: Job, service: Service, visitor: Visitor) -> None:
    visitor.page.evaluate("window.stayed = true")
    asked = len(visitor.requests)
    service.train(job, 5)
    expect(figure(visitor, "Step").first).to_contain_text("25 / 100")
    expect(figure(visitor, "Loss")).to_contain_text("0.1600")
    wait_until(lambda: points(visitor, "Loss") == 25)
    assert visitor.page.evaluate("window.stayed")
    assert visitor.requests[asked:] == [], "it came over the stream that was open"


def test_resizing_asks_first_and_marks_the_curves(job: Job, service: Service, visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_role("button", name="Resize").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("this job may have 1 to 6")
    dialog.get_by_label("Workers").fill("4")
    with page.expect_request(lambda request: request.method == "PATCH") as caught:
        dialog.get_by_role("button", name="Resize job").click()
    assert caught.value.url == f"{service.url}/v1/jobs/{job.id}"
    assert json.loads(caught.value.post_data or "") == {"workers": 4}
    assert caught.value.headers["if-match"] == str(job.version)
    expect(dialog).to_have_count(0)
    wait_until(lambda: service.plane.get(job.id).workers == 4)
    service.train(job, 1)
    expect(page.locator(".rank-memory")).to_have_count(4)
    expect(chart(visitor, "Loss").locator(".mark-resize text")).to_have_text("2→4")
    expect(page.locator(".event[data-kind=resize]")).to_contain_text("2 → 4 workers at step 20 by dashboard")
    expect(figure(visitor, "Workers")).to_contain_text("4")


def test_a_drained_node_shows_as_a_pause_by_phase_and_in_the_events(
    service: Service, visitor: Visitor
) -> None:
    service.stop()
    service.cluster = FakeCluster(cpus=1, nodes=3)
    service.start()
    job = service.submit()
    service.train(job, 5)
    page = visitor.page
    visitor.open(f"jobs/{job.id}")
    expect(page.locator("#connection")).to_have_text("live")
    expect(figure(visitor, "Goodput")).to_contain_text("% of the time")
    service.plane.drain("node-1", why="test", deadline_s=300, who="test")
    told = page.locator(".event[data-kind=drain]")
    expect(told).to_contain_text("node node-1 with w1: its workers are moved to other nodes")
    row = page.get_by_role("region", name="Pauses by phase").locator("tbody tr")
    expect(row).to_have_count(1)
    cells = row.locator("th, td").all_text_contents()
    assert cells[:5] == ["5", "resize", "drain", "2 → 2", "300 ms"]
    assert cells[5:9] == ["50 ms", "100 ms", "100 ms", "50 ms"], "stop, form, start, move"
    visitor.open("cluster")
    expect(page.locator(".node .badge")).to_have_text(["alive", "draining", "alive"])


def test_a_refused_resize_says_why_and_stays_open(job: Job, service: Service, visitor: Visitor) -> None:
    visitor.page.get_by_role("button", name="Resize").click()
    dialog = visitor.page.get_by_role("dialog")
    dialog.get_by_label("Workers").fill("7")
    dialog.get_by_role("button", name="Resize job").click()
    expect(dialog.get_by_role("alert")).to_contain_text("7 workers are more than this job's workers.max of 6")
    visitor.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert service.plane.get(job.id).wanted_workers == 2


def test_a_resize_of_what_has_changed_meanwhile_is_refused(
    job: Job, service: Service, visitor: Visitor
) -> None:
    visitor.page.get_by_role("button", name="Resize").click()
    service.plane.resize(job.id, 3, who="someone")
    dialog = visitor.page.get_by_role("dialog")
    dialog.get_by_label("Workers").fill("5")
    dialog.get_by_role("button", name="Resize job").click()
    expect(dialog.get_by_role("alert")).to_contain_text("version")
    assert service.plane.get(job.id).wanted_workers == 3


def test_pause_resume_and_cancel(job: Job, service: Service, visitor: Visitor) -> None:
    page = visitor.page
    badge = page.locator(".job-title .badge")
    for action, confirmation, state in (
        ("Pause", "Pause job", "paused"),
        ("Resume", "Resume job", "running"),
        ("Cancel", "Cancel job", "cancelled"),
    ):
        page.get_by_role("button", name=action, exact=True).click()
        page.get_by_role("dialog").get_by_role("button", name=confirmation).click()
        expect(badge).to_have_text(state)
    expect(page.locator("#connection")).to_have_text("finished")
    expect(page.locator(".controls button:visible")).to_have_count(0)


def test_a_failure_shows_its_traceback_as_text(job: Job, service: Service, visitor: Visitor) -> None:
    service.cluster.fail(job.id, "<b onclick=alert(1)>no such key</b>")
    alert = visitor.page.get_by_role("alert")
    expect(alert).to_contain_text("The job failed on rank 0")
    expect(alert).to_contain_text("<b onclick=alert(1)>no such key</b>")
    assert visitor.page.locator("main b").count() == 0
    expect(visitor.page.locator(".job-title .badge")).to_have_text("failed")


def test_a_job_that_ends_is_read_to_its_end(job: Job, service: Service, visitor: Visitor) -> None:
    service.train(job, 80)
    expect(visitor.page.locator("#connection")).to_have_text("finished")
    expect(visitor.page.locator(".job-title .badge")).to_have_text("succeeded")
    expect(visitor.page.locator(".event[data-kind=checkpoint]")).to_contain_text("step 100")
    wait_until(lambda: points(visitor, "Loss") == 100)


def test_after_a_restart_of_the_service_nothing_is_missing(
    job: Job, service: Service, visitor: Visitor
) -> None:
    service.stop()
    expect(visitor.page.locator("#connection")).to_have_text("disconnected")
    expect(visitor.page.get_by_text("What is shown may be out of date")).to_be_visible()
    service.cluster.train(job.id, 10)
    service.start()
    expect(visitor.page.locator("#connection")).to_have_text("live")
    expect(figure(visitor, "Step").first).to_contain_text("30 / 100")
    wait_until(lambda: points(visitor, "Loss") == 30)
    expect(visitor.page.get_by_text("What is shown may be out of date")).to_have_count(0)


def test_an_unknown_job_is_told(visitor: Visitor) -> None:
    visitor.open("jobs/nothing")
    expect(visitor.page.get_by_role("alert")).to_contain_text("There is no such job")
