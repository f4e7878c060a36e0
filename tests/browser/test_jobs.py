"""The list of jobs and the cluster, as a user sees them."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Service, Visitor

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


def test_without_jobs_it_says_how_to_submit_one(visitor: Visitor) -> None:
    expect(visitor.page.get_by_text("No job has been submitted yet.")).to_be_visible()


def test_a_job_appears_and_advances_without_a_reload(service: Service, visitor: Visitor) -> None:
    job = service.submit()
    row = visitor.page.get_by_role("row").filter(has_text=job.id)
    expect(row.get_by_role("link", name="browser job")).to_be_visible()
    expect(row).to_contain_text("running")
    service.train(job, 8)
    expect(row).to_contain_text("8 / 100")
    # Two ranks of 128 tokens each in steps of 0.1 s; the loss of step 8 is 4 / 8.
    expect(row.locator("[data-label='Tokens/s']")).to_have_text("2.56k")
    expect(row.locator("[data-label='Loss']")).to_have_text("0.5000")
    expect(row.locator("[data-label='Workers']")).to_have_text("2")


def test_the_filter_shows_one_state(service: Service, visitor: Visitor) -> None:
    running = service.submit(name="goes on")
    stopped = service.submit(name="was stopped")
    service.plane.cancel(stopped.id, who="test")
    visitor.page.get_by_label("State").select_option("cancelled")
    expect(visitor.page.get_by_role("link", name="was stopped")).to_be_visible()
    expect(visitor.page.get_by_text(running.id)).to_have_count(0)
    visitor.page.get_by_label("State").select_option("paused")
    expect(visitor.page.get_by_text("No job is paused.")).to_be_visible()


def test_a_name_with_markup_stays_text(service: Service, visitor: Visitor) -> None:
    service.store_named("evil", EVIL)
    page = visitor.page
    link = page.locator("a[data-job=evil]")
    expect(link).to_have_text(EVIL)
    link.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(EVIL)
    assert page.locator("main img, main script").count() == 0
    assert page.title() == f"{EVIL} · elastic-zero"


def test_an_unreachable_service_is_told_and_found_again(service: Service, visitor: Visitor) -> None:
    service.submit()
    page = visitor.page
    expect(page.get_by_role("link", name="browser job")).to_be_visible()
    service.stop()
    expect(page.get_by_role("alert")).to_contain_text("The list is not up to date")
    expect(page.locator("#connection")).to_have_text("disconnected")
    service.start()
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_cluster_shows_what_is_used_and_free(service: Service, visitor: Visitor) -> None:
    service.submit()
    visitor.page.get_by_role("link", name="Cluster").click()
    everything = visitor.page.locator("section").filter(has_text="All nodes")
    expect(everything).to_contain_text("1 of 1 alive")
    expect(everything).to_contain_text("2 of 8 used6 free")
    service.cluster.available = False
    expect(visitor.page.get_by_role("alert")).to_contain_text("the cluster was made unavailable")
    service.cluster.available = True
    expect(visitor.page.get_by_role("alert")).to_have_count(0)


def test_the_keyboard_reaches_the_content_at_once(visitor: Visitor) -> None:
    page = visitor.page
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="To the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_runs_over_the_edge(service: Service, visitor: Visitor, width: int) -> None:
    job = service.submit(name="a name of some length that has to be broken somewhere on a small screen")
    service.train(job, 5)
    visitor.page.set_viewport_size({"width": width, "height": 800})
    for address in ("jobs", f"jobs/{job.id}", "cluster"):
        visitor.open(address)
        visitor.page.get_by_role("heading", level=1).wait_for()
        expect(visitor.page.locator("#connection")).to_have_text("live")
        assert visitor.page.evaluate("document.documentElement.scrollWidth") <= width, address
