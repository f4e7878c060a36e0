"""Signing in and out, and what the browser is told to refuse."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Visitor

pytestmark = pytest.mark.browser


def test_without_a_session_there_is_only_the_form(stranger: Visitor) -> None:
    answer = stranger.page.goto(f"{stranger.url}/dashboard")
    assert answer is not None
    assert answer.status == 401
    assert "script" not in stranger.page.content()
    asset = stranger.page.request.get(f"{stranger.url}/dashboard/assets/main.js")
    assert asset.status == 401


def test_a_wrong_token_is_refused_and_the_right_one_opens_the_page(stranger: Visitor) -> None:
    page = stranger.page
    page.goto(f"{stranger.url}/dashboard")
    page.get_by_label("Token").fill("not the token")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_have_text("That is not this service's token.")
    stranger.sign_in()
    cookie = next(c for c in page.context.cookies() if c["name"] == "elastic_zero_session")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    assert "document.cookie" not in page.content()
    assert page.evaluate("document.cookie") == ""


def test_signing_out_brings_the_form_back(visitor: Visitor) -> None:
    visitor.page.get_by_role("button", name="Sign out").click()
    expect(visitor.page.get_by_label("Token")).to_be_visible()
    visitor.open("jobs")
    expect(visitor.page.get_by_label("Token")).to_be_visible()


def test_a_session_that_ends_leads_back_to_the_form(visitor: Visitor) -> None:
    visitor.page.context.clear_cookies()
    expect(visitor.page.get_by_label("Token")).to_be_visible()


def test_the_policy_lets_no_inline_code_run(visitor: Visitor) -> None:
    answer = visitor.page.request.get(f"{visitor.url}/dashboard")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    refused = visitor.page.evaluate(
        """() => {
          const script = document.createElement("script");
          try {
            script.text = "window.ran = true";
            document.body.append(script);
          } catch (error) {
            return error.name;
          }
          return String(window.ran);
        }"""
    )
    assert refused in {"TypeError", "undefined"}
    visitor.faults.clear()  # the browser says that it refused


def test_files_are_sent_once_while_they_are_the_same(visitor: Visitor) -> None:
    url = f"{visitor.url}/dashboard/assets/main.js"
    first = visitor.page.request.get(url)
    again = visitor.page.request.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert (first.status, again.status) == (200, 304)
    assert visitor.page.request.get(f"{visitor.url}/dashboard/assets/../routes.py").status == 404
    assert visitor.page.request.get(f"{visitor.url}/dashboard/assets/..%2froutes.py").status == 404
