"""hypic without a framework: passages are computed once, then reused in any order and at any place.

python examples/quickstart.py            the bundled demo model
python examples/quickstart.py FOLDER     a checkpoint of your own

The demo model's primer has rungs: by default it keeps a passage once for each of four ranges of places, which is closer
to full recompute (examples/primer_places.py). rungs=False keeps it once for all places.
"""

import sys

from hypic import LLM, Prompt, SamplingParams, Segment

PASSAGES = {
    "leave": "Employees receive 27 days of paid leave a year. Unused leave expires on 31 March of the following year. "
    "Leave of more than three weeks in a row must be agreed with the team lead two months ahead.",
    "travel": "The company pays a travel allowance of 34 euros a day. Trains are booked in second class. Receipts are "
    "uploaded within 30 days, and hotel rooms may cost up to 120 euros a night.",
    "safety": "The assembly point is the car park behind hall B. Fire drills are held twice a year. The safety officer "
    "is Jonas Weber, who can be reached at extension 4417.",
}


def ask(llm: LLM, question: str, *names: str) -> None:
    """Streams an answer from the named passages, then tells what was computed for it."""
    prompt = Prompt([Segment(PASSAGES[name], name=name) for name in names], tail=question)
    print(f"\nQ: {question}\nA: ", end="")
    for piece in llm.stream(prompt, SamplingParams(max_tokens=32)):
        print(piece.text, end="", flush=True)
    report = piece.report
    print()
    for segment in report.segments:
        print(f"   {segment.name}: {segment.outcome}, {segment.num_tokens} tokens")
    print(f"   {report.computed_tokens} tokens computed for a prompt of {report.prompt_tokens}")


with LLM(*sys.argv[1:2], rungs=False) as llm:
    ask(llm, "How many days of paid leave do employees receive?", "leave", "travel")
    # The same passages in another order, with a new one between them: only the new one is computed.
    ask(llm, "Who is the safety officer?", "travel", "safety", "leave")
