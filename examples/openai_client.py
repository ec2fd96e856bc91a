"""OpenAI's own client on a running server: every content part is a segment, and the answer tells what was reused.

hypic serve                                               in one terminal
python examples/openai_client.py                          in another
python examples/openai_client.py http://host:8000/v1      a server somewhere else

The demo model's primer has rungs: by default it keeps a passage once for each of four ranges of places, which is closer
to full recompute. "rungs": false keeps it once for all places.
"""

import sys

from openai import OpenAI

PASSAGES = [
    "Employees receive 27 days of paid leave a year. Unused leave expires on 31 March of the following year. Leave of "
    "more than three weeks in a row must be agreed with the team lead two months ahead.",
    "The company pays a travel allowance of 34 euros a day. Trains are booked in second class; flights under 600 "
    "kilometres are not refunded. Receipts are uploaded within 30 days.",
    "The assembly point is the car park behind hall B. Fire drills are held twice a year. The safety officer is Jonas "
    "Weber, who can be reached at extension 4417.",
]


def ask(client: OpenAI, model: str, question: str, passages: list[str], **hypic: str | bool) -> None:
    """Streams an answer, then tells what became of each passage."""
    parts = [{"type": "text", "text": text} for text in (*passages, question)]
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": parts}],
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"hypic": {"rungs": False, **hypic}},
    )
    print(f"\nQ: {question}\nA: ", end="")
    report = None
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        report = getattr(chunk, "hypic", report)
    outcomes = ", ".join(segment["outcome"] for segment in report["segments"])
    print(f"\n   passages: {outcomes}")
    print(f"   {chunk.usage.prompt_tokens_details.cached_tokens} of {chunk.usage.prompt_tokens} tokens reused")


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    client = OpenAI(base_url=url, api_key="none is needed on this machine")
    model = client.models.list().data[0].id
    ask(client, model, "How many days of paid leave do employees receive?", PASSAGES)
    # The same passages in another order: nothing but the question and the seams is computed.
    ask(client, model, "Who is the safety officer?", PASSAGES[::-1])
    # The same again with everything computed, to compare.
    ask(client, model, "Who is the safety officer?", PASSAGES[::-1], reuse="none")


if __name__ == "__main__":
    main(*sys.argv[1:2])
