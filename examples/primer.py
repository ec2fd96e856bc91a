"""A primer: a text behind which every passage is encoded, so that none begins at the beginning of everything.

It stands in no prompt and costs a request nothing. Take a few sentences that are like your own passages, and look at
what they change: the closer to full recompute, the smaller the divergence.

python examples/primer.py            the bundled demo model
python examples/primer.py FOLDER     a checkpoint of your own
"""

import sys

from hypic import LLM, Policy, Prompt, SamplingParams, Segment

PRIMER = """The canteen opens at half past eleven. Guests are announced at the front desk, and pay by card.

The office in Elmsworth was closed in 2019. Its staff of twelve moved to the main building by the river."""
PASSAGES = {
    "leave": "Employees receive 27 days of paid leave a year. Unused leave expires on 31 March of the following year. "
    "Leave of more than three weeks in a row must be agreed with the team lead two months ahead.",
    "travel": "The company pays a travel allowance of 34 euros a day. Trains are booked in second class. Receipts are "
    "uploaded within 30 days, and hotel rooms may cost up to 120 euros a night.",
    "safety": "The assembly point is the car park behind hall B. Fire drills are held twice a year. The safety officer "
    "is Jonas Weber, who can be reached at extension 4417.",
}


def prompt(question: str, *names: str) -> Prompt:
    return Prompt([Segment(PASSAGES[name], name=name) for name in names], question)


def ask(llm: LLM, question: str, *names: str) -> None:
    """Prints an answer, and what was computed for it: the primer is not counted."""
    answer = llm.generate(prompt(question, *names), SamplingParams(max_tokens=32))
    print(f"\nQ: {question}\nA: {answer.text}")
    print(f"   {answer.report.computed_tokens} tokens computed for a prompt of {answer.report.prompt_tokens}")


def divergence(llm: LLM, policy: Policy) -> float:
    """Of the next token from full recompute, in nats: a mean over the answers to three questions."""
    questions = ("How many days of leave are paid?", "How high is the allowance?", "Who is the safety officer?")
    found = [llm.compare(prompt(question, *PASSAGES), policy=policy) for question in questions]
    return sum(one.segments.kl for one in found) / len(found)


with LLM(*sys.argv[1:2], primer=PRIMER) as llm:
    ask(llm, "How many days of paid leave do employees receive?", "leave", "travel")
    ask(llm, "How high is the travel allowance?", "travel", "leave")
    print(f"\ndivergence from full recompute: {divergence(llm, Policy()):.3g} nats behind the primer,")
    print(f"{divergence(llm, Policy(primed=False)):.3g} without it")
