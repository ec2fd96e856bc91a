"""The page in headless Chromium: upload, ask twice, colours, an edit, errors, hostile names, the keyboard, closing.

Screenshots are kept under pytest's ``tmp_path``. Skipped where Chromium or its driver is missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested with selenium, which is not installed")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from hypic import LLM
from hypic.checkpoints import bundled
from hypic_apps.rag.app import create_app
from hypic_apps.rag.service import About
from tests.apps.rag.conftest import SMALL
from tests.apps.rag.talking import HANDBOOK
from tests.apps.server.serving import in_thread, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="the page is tested in Chromium: install chromium and chromium-driver to run these tests",
)
WAIT_S = 20
FLAGS = ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1280,900")


class Browser:
    """What a person does with the page."""

    def __init__(self, driver: webdriver.Chrome, url: str, folder: Path) -> None:
        self.driver, self.url, self.folder = driver, url, folder
        driver.get(url)
        self.until(lambda: self.one("#model").text != "")

    def one(self, selector: str) -> Any:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, holds: Any) -> None:
        WebDriverWait(self.driver, WAIT_S, poll_frequency=0.05).until(lambda _: holds())

    def upload(self, name: str, data: bytes) -> None:
        path = self.folder / name
        path.write_bytes(data)
        self.one("#files").send_keys(str(path))
        self.until(lambda: self.one("#note").is_displayed() or self.one("#problem").is_displayed())

    def tool(self, label: str) -> None:
        """Presses a document's button, which shows when the document is pointed at."""
        button = self.one(f"[aria-label='{label}']")
        ActionChains(self.driver).move_to_element(button).click().perform()

    def ask(self, question: str) -> Any:
        """The new turn, answered or refused."""
        num = len(self.all(".turn"))
        self.one("#question").send_keys(question, Keys.ENTER)
        self.until(lambda: len(self.all(".turn")) == num + 1 and not self.all(".turn.busy"))
        return self.all(".turn")[-1]

    def colours(self, turn: Any) -> set[str]:
        """The background colours of a turn's passages."""
        pieces = turn.find_elements(By.CSS_SELECTOR, ".strip > .hit, .strip > .encoded")
        return {piece.value_of_css_property("background-color") for piece in pieces}

    def errors(self) -> list[str]:
        """What the browser complained of, refused requests aside, which are answers."""
        return [e["message"] for e in self.driver.get_log("browser") if "status of 4" not in e["message"]]


@pytest.fixture(scope="module")
def driver() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for flag in FLAGS:
        options.add_argument(flag)
    options.binary_location = CHROMIUM or ""
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as chrome:
        yield chrome


@pytest.fixture
def browser(driver: webdriver.Chrome, llm: LLM, tmp_path: Path) -> Iterator[Browser]:
    with in_thread(create_app(llm, About("tiny-hybrid answers."), k=4, max_tokens=6, limits=SMALL)) as url:
        yield Browser(driver, url, tmp_path)
        driver.get("about:blank")


def test_upload_ask_twice_and_the_colours_change(browser: Browser, tmp_path: Path) -> None:
    assert browser.one("#model").text == "tiny-hybrid answers." and browser.one("#sample").is_displayed()
    browser.upload("handbook.md", HANDBOOK.encode())
    assert "handbook.md: 2 passages" in browser.one("#note").text
    first = browser.ask("What do employees receive?")
    assert len(first.find_elements(By.CSS_SELECTOR, ".strip > .encoded")) == 2
    assert not first.find_elements(By.CSS_SELECTOR, ".strip > .hit")
    second = browser.ask("What do employees on the road receive?")
    assert len(second.find_elements(By.CSS_SELECTOR, ".strip > .hit")) == 2
    assert not second.find_elements(By.CSS_SELECTOR, ".strip > .encoded")
    (before,), (after,) = browser.colours(first), browser.colours(second)
    assert before != after
    assert "reused (2)" in second.text and "were computed." in second.text
    browser.until(lambda: "2 of 2 passages cached" in browser.one("#documents").text)
    second.find_element(By.CSS_SELECTOR, ".measure").click()
    browser.until(lambda: len(second.find_elements(By.CSS_SELECTOR, ".bars .track")) == 3)
    assert browser.driver.save_screenshot(str(tmp_path / "asked_twice.png"))
    assert browser.errors() == []


def test_pointing_and_the_keyboard_tell_what_a_part_is(browser: Browser) -> None:
    browser.upload("handbook.md", HANDBOOK.encode())
    turn = browser.ask("What do employees receive?")
    passage = turn.find_element(By.CSS_SELECTOR, ".strip > .encoded")
    ActionChains(browser.driver).move_to_element(passage).perform()
    detail = turn.find_element(By.CSS_SELECTOR, ".detail")
    assert detail.text.startswith("handbook.md › ") and "tokens, computed now and kept (" in detail.text
    turn.find_element(By.CSS_SELECTOR, ".strip > [tabindex='0']").send_keys(Keys.ARROW_RIGHT)
    focused = browser.driver.switch_to.active_element
    assert focused.get_attribute("class") == "encoded" and "computed now" in focused.get_attribute("aria-label")
    assert len(turn.find_elements(By.CSS_SELECTOR, ".strip > [tabindex='0']")) == 1


def test_an_edit_and_a_deletion_say_what_is_recomputed(browser: Browser) -> None:
    browser.upload("handbook.md", HANDBOOK.encode())
    browser.ask("What do employees receive?")
    browser.until(lambda: "2 of 2 passages cached" in browser.one("#documents").text)
    browser.tool("Edit handbook.md")
    browser.until(lambda: browser.one("#text").get_property("value") == HANDBOOK)
    browser.one("#text").clear()
    browser.one("#text").send_keys(HANDBOOK.replace("27", "30"))
    browser.one("#save").click()
    browser.until(lambda: "1 passage changed (Leave)" in browser.one("#note").text)
    browser.until(lambda: "1 of 2 passages cached" in browser.one("#documents").text)
    turn = browser.ask("What do the employees receive?")
    assert len(browser.colours(turn)) == 2, "one passage was computed and one was found"
    browser.until(lambda: "2 of 2 passages cached" in browser.one("#documents").text)
    browser.tool("Delete handbook.md")
    browser.until(lambda: "handbook.md is deleted" in browser.one("#note").text)
    browser.until(lambda: browser.all("#documents li") == [])


def test_errors_are_sentences_in_the_page(browser: Browser, tmp_path: Path) -> None:
    browser.upload("old.txt", "Grüße".encode("latin-1"))
    problem = browser.one("#problem")
    assert problem.is_displayed() and problem.text.startswith("old.txt is not UTF-8 (byte 0xfc at 2)")
    turn = browser.ask("Anything?")
    assert "There is no document yet" in turn.find_element(By.CSS_SELECTOR, "[role=alert]").text
    browser.one("#paste").click()
    browser.one("#save").click()
    browser.until(lambda: "holds no text" in browser.one("#editor-problem").text)
    assert browser.driver.save_screenshot(str(tmp_path / "errors.png"))


def test_a_hostile_name_and_text_are_shown_and_not_run(browser: Browser) -> None:
    hostile = "<img src=x onerror=document.title='owned'>"
    browser.one("#paste").click()
    browser.one("#name").send_keys(hostile)
    browser.one("#text").send_keys(f"{hostile} <script>document.title='owned'</script> employees receive leave.")
    browser.one("#save").click()
    browser.until(lambda: browser.all("#documents li"))
    turn = browser.ask("What do employees receive?")
    turn.find_element(By.CSS_SELECTOR, ".strip > .encoded").click()
    assert hostile in browser.one("#documents").text and hostile in turn.text
    assert browser.driver.title == "hypic: ask your documents" and browser.all("img[src=x], .turn script") == []
    assert browser.errors() == []


def test_closing_the_page_aborts_its_request(driver: webdriver.Chrome, llm: LLM, tmp_path: Path) -> None:
    with in_thread(create_app(llm, About("it answers."), k=2, max_tokens=1500)) as url:
        browser = Browser(driver, url, tmp_path)
        browser.upload("handbook.md", HANDBOOK.encode())
        browser.one("#question").send_keys("employees", Keys.ENTER)
        browser.until(lambda: browser.one(".turn .answer").text != "")
        assert llm.stats()["requests"]["running"] == 1
        driver.get("about:blank")
        until(lambda: llm.stats()["requests"] == {"waiting": 0, "running": 0}, 10)


@pytest.mark.skipif(not bundled().is_dir(), reason="this installation has no bundled model")
def test_the_bundled_model_answers_the_samples(driver: webdriver.Chrome, tmp_path: Path) -> None:
    with LLM(threads=2, memory="1GiB") as llm, in_thread(create_app(llm, About("hypic-tiny answers."))) as url:
        browser = Browser(driver, url, tmp_path)
        browser.one("#sample").click()
        browser.until(lambda: browser.all("#samples button") and browser.one("#samples").is_displayed())
        browser.all("#samples button")[1].click()
        browser.until(lambda: browser.all(".turn") and not browser.all(".turn.busy"))
        assert browser.one(".turn .answer").text == "Leila Haddad"
        turn = browser.ask("What is the budget of Project Kittiwake?")
        assert turn.find_elements(By.CSS_SELECTOR, ".strip > .hit"), "passages of the first question came back"
        assert driver.save_screenshot(str(tmp_path / "bundled.png"))
        assert browser.errors() == []
        driver.get("about:blank")
