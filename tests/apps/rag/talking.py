"""What the page's script does, in Python: calls, and event streams read to their end. And a PDF, made by hand."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

LEAVE = "# Leave\n\nEmployees receive 27 days of paid leave a year, and unused leave expires at the end of March."
TRAVEL = "# Travel\n\nThe company pays a travel allowance of 34 euros a day for employees who are on the road."
HANDBOOK = f"{LEAVE}\n\n{TRAVEL}\n"


class Page(TestClient):
    """A client that comes under one of this machine's own names."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(app, base_url="http://localhost", raise_server_exceptions=False)

    def events(self, method: str, path: str, **sent: Any) -> list[Any]:
        """The events of a stream, the end mark left out."""
        response = self.request(method, path, **sent)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *blocks, done, rest = response.text.split("\n\n")
        assert done == "data: [DONE]" and rest == ""
        return [json.loads(block.removeprefix("data: ")) for block in blocks]

    def last(self, method: str, path: str, **sent: Any) -> Any:
        return self.events(method, path, **sent)[-1]

    def add(self, name: str, text: str) -> Any:
        return self.last("POST", "/api/documents", json={"name": name, "text": text})

    def upload(self, name: str, data: bytes) -> Any:
        return self.last("POST", "/api/files", params={"name": name}, content=data)

    def ask(self, question: str, conversation: str | None = None) -> list[Any]:
        return self.events("POST", "/api/ask", json={"question": question, "conversation": conversation})

    def documents(self) -> dict[str, Any]:
        return {document["name"]: document for document in self.get("/api/state").json()["documents"]}


def problem(event: Any) -> str:
    """The sentence of an error event."""
    message = event["error"]["message"]
    assert event["type"] == "error" and isinstance(message, str) and message.endswith(".")
    return message


def outcomes(event: Any) -> list[str]:
    """What happened to the passages of a prompt, in its order."""
    return [piece["outcome"] for piece in event["strip"] if piece["source"]]


def pdf(*lines: str) -> bytes:
    """A one-page PDF that shows the lines; without any it has no text."""
    shown = "".join(f"({line}) Tj 0 -16 Td " for line in lines)
    content = f"BT /F1 12 Tf 72 720 Td {shown}ET".encode("latin-1")
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        b"/Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    file, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, start = len(objects) + 1, len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return file + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (size, start)
