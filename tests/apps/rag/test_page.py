"""The routes of the page on a tiny model: documents, prompts as strips, conversations, measuring, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypic import LLM
from hypic_apps.cli.main import main
from hypic_apps.rag.app import STATIC
from hypic_apps.rag.library import Library
from hypic_apps.rag.measuring import within
from tests.apps.rag.talking import HANDBOOK, LEAVE, TRAVEL, Page, outcomes, pdf, problem

HOSTILE = "<img src=x onerror=alert(1)>.md"


# -- documents -------------------------------------------------------------------------------------------------------


def test_a_document_is_added_listed_read_and_deleted(page: Page, llm: LLM) -> None:
    added = page.add("handbook.md", HANDBOOK)
    assert added == {"type": "added", "names": ["handbook.md"], "is_edit": False, "num_new": 2, "num_gone": 0,
                     "num_unchanged": 0, "new": ["Leave", "Travel"]}  # fmt: skip
    card = page.documents()["handbook.md"]
    assert card["num_passages"] == 2 and card["num_cached"] == 0 and card["num_chars"] == len(HANDBOOK)
    assert page.get(f"/api/documents/{card['id']}").json()["text"] == HANDBOOK
    warmed = page.events("POST", "/api/warm", json={})
    assert [e["done"] for e in warmed[:-1]] == [0, 2] and warmed[-1]["num_encoded"] == 2
    assert page.documents()["handbook.md"]["num_cached"] == 2
    gone = page.delete(f"/api/documents/{card['id']}").json()
    assert gone == {"name": "handbook.md", "num_dropped": 2} and page.documents() == {}
    assert llm.stats()["store"]["num_entries"] == 0
    assert page.get(f"/api/documents/{card['id']}").status_code == 404


def test_text_markdown_and_pdf_are_taken(page: Page) -> None:
    assert page.upload("a.txt", "\ufeffUm 9 Uhr öffnet die Bibliothek.".encode())["num_new"] == 1
    assert page.upload("C:\\notes\\b.md", LEAVE.encode())["names"] == ["b.md"]
    assert page.upload("c.pdf", pdf("The ferry leaves at noon,", "and returns at six."))["num_new"] == 1
    text = page.get(f"/api/documents/{page.documents()['c.pdf']['id']}").json()["text"]
    assert text == "The ferry leaves at noon,\nand returns at six."
    assert set(page.documents()) == {"a.txt", "b.md", "c.pdf"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "holds no text"),
        (b" \n\t ", "holds no text"),
        ("Grüße".encode("latin-1"), "is not UTF-8 (byte 0xfc at 2)"),
        ("text".encode("utf-16"), "is UTF-16 text"),
        (b"\x89PNG\x0d\x0a\x1a\x0a\x00\x00", "is no text (a zero byte"),
        (pdf(), "is a PDF without text"),
        (pdf("hello")[:300], "is a PDF that cannot be read"),
        (b"%PDF-1.7 nothing of the kind", "is a PDF that cannot be read"),
        (b"a" * 9_001, "9,001 characters and the limit is 9,000"),
        (b"a" * 20_001, "20,001 bytes and the limit is 20,000"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(page: Page, data: bytes, told: str) -> None:
    message = problem(page.upload("x.bin", data))
    assert message.startswith("x.bin ") and told in message and "\n" not in message
    assert page.documents() == {}, "nothing of it was kept"


def test_an_encrypted_pdf_is_refused(page: Page) -> None:
    import io

    import pypdf

    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("secret")))
    writer.encrypt("password", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    assert "is a PDF with a password" in problem(page.upload("s.pdf", file.getvalue()))


def test_too_many_documents_and_too_much_text_are_refused(page: Page) -> None:
    for number in range(3):
        page.add(f"{number}", "x " * 4_490)
    assert "all documents may have 30,000 characters" in problem(page.add("3", "x " * 4_000))
    for number in range(3, 6):
        page.add(f"{number}", "short")
    assert "6 documents are the limit" in problem(page.add("6", "short"))
    assert page.add("5", "another")["is_edit"], "a new text for a name that is there needs no room for one more"


def test_a_body_over_every_limit_is_not_read(page: Page) -> None:
    response = page.post("/api/files?name=a", content=b"x" * 200_000)
    assert response.status_code == 413 and "more than" in response.json()["error"]["message"]


def test_a_hostile_name_and_text_stay_text(page: Page) -> None:
    names = page.add(HOSTILE, "<script>alert(1)</script> " * 4)["names"]
    assert names == [HOSTILE] and list(page.documents()) == [HOSTILE]
    assert page.add("a\x00b\u202e\nc  d", "text")["names"] == ["a b c d"]
    assert problem(page.add(" / ", "text")) == "the document has no name; give it one."
    assert len(page.add("n" * 500, "text")["names"][0]) == 120
    assert page.get("/").headers["content-security-policy"].startswith("default-src 'self'")


def test_a_change_that_is_broken_off_leaves_everything_as_it_was() -> None:
    library = Library()
    library.add({"a": LEAVE})
    before = library.passages()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.add({"a": TRAVEL, "b": TRAVEL}, stop)
    assert library.passages() == before and [d["name"] for d in library.listing()] == ["a"]


def test_the_samples_are_one_call_away(llm: LLM) -> None:
    from hypic_apps.rag.app import create_app
    from hypic_apps.rag.service import About

    with Page(create_app(llm, About("it answers."))) as page:
        told = page.events("POST", "/api/corpus")
        assert told[-1]["num_new"] >= 17 and any(e["type"] == "progress" for e in told[:-1])
        assert {"handbook.md", "minutes.md", "Norway"} <= set(page.documents())
        assert "Who leads Project Kittiwake?" in page.get("/api/state").json()["samples"]


# -- asking ----------------------------------------------------------------------------------------------------------


def test_asked_twice_passages_are_encoded_and_then_found(page: Page) -> None:
    page.add("handbook.md", HANDBOOK)
    prompt, *texts, report = page.ask("What do employees receive?")
    assert prompt["type"] == "prompt" and outcomes(prompt) == ["pending"] * 2
    assert all(event["type"] == "text" for event in texts) and report["type"] == "report"
    assert outcomes(report) == ["encoded"] * 2 and report["num_hits"] == 0
    assert sum(piece["tokens"] for piece in report["strip"]) == report["prompt_tokens"]
    assert [p["outcome"] for p in (report["strip"][0], report["strip"][-1])] == ["live", "live"]
    again = page.ask("Which employees travel?")[-1]
    assert outcomes(again) == ["hit"] * 2 and again["num_hits"] == 2
    interiors = sum(piece["tokens"] - piece["seam"] for piece in again["strip"] if piece["source"])
    assert again["reused_tokens"] == interiors + again["head_tokens"] > 0
    assert again["computed_tokens"] == again["prompt_tokens"] - again["reused_tokens"]
    assert {p["label"] for p in again["strip"] if p["source"]} == {"Leave", "Travel"}
    assert page.documents()["handbook.md"]["num_cached"] == 2


def test_an_edit_recomputes_only_what_changed(page: Page) -> None:
    page.add("handbook.md", HANDBOOK)
    page.ask("What do employees receive?")
    id = page.documents()["handbook.md"]["id"]
    change = page.last("PUT", f"/api/documents/{id}", json={"text": HANDBOOK.replace("27 days", "41 days")})
    assert (change["num_new"], change["num_unchanged"], change["new"]) == (1, 1, ["Leave"])
    assert page.documents()["handbook.md"]["num_cached"] == 1
    report = page.ask("What do employees receive?")[-1]
    told = {piece["label"]: (piece["outcome"], piece["reason"]) for piece in report["strip"] if piece["source"]}
    assert told["Travel"] == ("hit", "")
    assert told["Leave"][0] == "encoded" and told["Leave"][1].startswith("same name but other text")


def test_deleting_one_document_recomputes_nothing_of_the_others(page: Page) -> None:
    page.add("leave.md", LEAVE)
    page.add("travel.md", TRAVEL)
    assert outcomes(page.ask("employees")[-1]) == ["encoded"] * 2
    assert page.delete(f"/api/documents/{page.documents()['leave.md']['id']}").json()["num_dropped"] == 1
    report = page.ask("Who are the employees?")[-1]
    assert outcomes(report) == ["hit"] and report["strip"][1]["source"] == "travel.md"


def test_earlier_turns_are_live_text_before_the_passages(page: Page) -> None:
    page.add("handbook.md", HANDBOOK)
    first = page.ask("What do employees receive?")
    conversation = first[0]["conversation"]
    second = page.ask("And the allowance?", conversation)
    assert second[0]["conversation"] == conversation and second[-1]["turn"] == 1
    live = second[-1]["strip"][0]
    assert live["label"] == "earlier questions and answers" and live["tokens"] > first[-1]["strip"][0]["tokens"]
    assert page.ask("And the allowance?")[-1]["turn"] == 0, "another tab's conversation is its own"


@pytest.mark.parametrize(
    ("question", "told"),
    [("", "is empty"), (" \n", "is empty"), ("x" * 201, "201 characters"), ("zebra", "no passage has a word")],
)
def test_a_question_that_cannot_be_asked(page: Page, question: str, told: str) -> None:
    page.add("handbook.md", HANDBOOK)
    assert told in problem(page.ask(question)[-1])


def test_without_documents_there_is_nothing_to_ask_or_encode(page: Page) -> None:
    assert "there is no document yet" in problem(page.ask("Anything?")[-1])
    assert "nothing to encode yet" in problem(page.last("POST", "/api/warm", json={}))
    assert "no longer there" in problem(page.ask("Anything?", "unknown")[-1])


def test_a_prompt_that_is_too_long_is_one_sentence(page: Page) -> None:
    page.add("handbook.md", HANDBOOK)
    conversation, found = None, []
    while not found or (found[-1]["type"] == "report" and len(found) < 30):
        first, *_, last = page.ask("employees " * 18, conversation)
        found.append(last)
        conversation = first["conversation"]
    assert "the context holds 2048" in problem(found[-1]) and len(found) > 2
    assert page.ask("employees")[-1]["type"] == "report", "a new conversation has room again"


# -- measuring -------------------------------------------------------------------------------------------------------


def test_measuring_tells_three_arms_and_leaves_the_cache_alone(page: Page, llm: LLM) -> None:
    page.add("handbook.md", HANDBOOK)
    prompt, *_, report = page.ask("What do employees receive?")
    before = llm.stats()["store"]["num_entries"]
    asked = {"conversation": prompt["conversation"], "turn": report["turn"]}
    *steps, measured = page.events("POST", "/api/measure", json=asked)
    assert [(e["done"], e["total"]) for e in steps] == [(n, 12) for n in range(13)]
    arms = {arm["name"]: arm for arm in measured["arms"]}
    assert list(arms) == ["full", "cold", "warm"] and measured["rounds"] == 3
    assert min(arm["ttft_s"] for arm in arms.values()) > 0
    assert arms["full"]["computed_tokens"] == arms["full"]["prompt_tokens"] == report["prompt_tokens"]
    assert arms["full"]["reused_tokens"] == 0 and arms["cold"]["num_hits"] == 0
    assert arms["warm"]["num_hits"] == 2 and arms["warm"]["computed_tokens"] < arms["full"]["computed_tokens"]
    # Heads of live text may stay, of which nobody asks by namespace; passages do not.
    assert llm.forget(namespace="measuring").num_cached == 0
    assert page.ask("What do employees receive?")[-1]["num_hits"] == 2, "the real passages are still there"
    assert llm.stats()["store"]["num_entries"] >= before
    assert "no longer there" in problem(page.last("POST", "/api/measure", json={**asked, "turn": 9}))


def test_what_is_measured_is_the_same_prompt(llm: LLM) -> None:
    hints = {"kind": "document", "name": "n", "source": "s", "namespace": None}
    content = [{"type": "text", "text": LEAVE, "extras": {"hypic": hints}}, {"type": "text", "text": "Why?"}]
    messages = [{"role": "user", "content": "Before?"}, {"role": "assistant", "content": "Yes."},
                {"role": "user", "content": content}]  # fmt: skip
    moved = within("elsewhere", messages)
    ids = [[i for piece in llm.tokenizer.encode(each) for i in piece.ids] for each in (messages, moved)]
    segments = [piece.segment for piece in llm.tokenizer.encode(moved) if piece.segment]
    assert ids[0] == ids[1] and [(s.namespace, s.name) for s in segments] == [("elsewhere", None)]


# -- who may come in -------------------------------------------------------------------------------------------------


def test_other_sites_and_other_names_are_refused(page: Page) -> None:
    body = {"name": "a", "text": "text"}
    foreign = page.post("/api/documents", json=body, headers={"origin": "https://example.com"})
    assert foreign.status_code == 403 and "example.com" in foreign.json()["error"]["message"]
    renamed = page.get("/api/state", headers={"host": "rebound.example.com"})
    assert renamed.status_code == 403
    own = page.post("/api/documents", json=body, headers={"origin": "http://localhost"})
    assert own.status_code == 200 and list(page.documents()) == ["a"]


def test_bad_requests_are_sentences_too(page: Page) -> None:
    for response in (
        page.post("/api/ask", content=b"no json"),
        page.post("/api/ask", json={"question": 3}),
        page.get("/static/../app.py"),
        page.get("/static/other.js"),
        page.put("/api/documents/unknown", json={"text": "x"}),
        page.delete("/api/documents/unknown"),
    ):
        assert 400 <= response.status_code < 500
        assert response.json()["error"]["message"].endswith(".")


def test_the_page_asks_nothing_of_other_places(page: Page) -> None:
    assert page.get("/").status_code == 200
    for name in ("index.html", "app.css", "app.js", "icon.svg"):
        text = (STATIC / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text and "https:" not in text and "//cdn" not in text, name
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, name
        assert page.get("/" if name == "index.html" else f"/static/{name}").status_code == 200, name


def test_the_page_is_served_to_this_machine_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["app", "--host", "0.0.0.0"]) == 2
    assert "no loopback address" in capsys.readouterr().err
    assert main(["app", "--host", "example.com"]) == 2
    assert main(["app", "--help"]) == 0
    assert "hypic app --open" in capsys.readouterr().out
