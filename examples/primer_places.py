"""A primer with rungs: closer to full recompute, for entries that depend on a passage's place in the prompt.

A model that numbers what it reads takes a passage for the one that follows the primer. A paragraph "---" ends a rung of
it, and a passage is encoded behind the rung that has about as many passages as the prompt has before it. One that comes
to stand behind another rung is encoded once more; what is warmed is found at every place. Under Policy(rungs=False) it
is encoded once for all places, behind the middle rung.

python examples/primer_places.py            the bundled demo model
python examples/primer_places.py FOLDER     a checkpoint of your own
"""

import sys

from hypic import LLM, Policy, Prompt, SamplingParams, Segment

FIRST = "The canteen opens at half past eleven. Guests are announced at the front desk, and pay by card."
OTHERS = (
    "The office in Elmsworth was closed in 2019. Its staff of twelve moved to the main building by the river.",
    "Parcels are kept at the gate until six. The gate keeper has the keys to the cellar and to the bicycle shed.",
    "The choir meets on Tuesdays in the small hall. New voices are welcome, and notes are lent for the season.",
)
# Rungs of no passage (the bare chat template), of one and of four.
PRIMER = "\n\n".join(("---", FIRST, "---", *OTHERS))
TEXTS = (
    "Employees receive 27 days of paid leave a year. Unused leave expires on 31 March of the following year. Leave of "
    "more than three weeks in a row must be agreed with the team lead two months ahead.",
    "The company pays a travel allowance of 34 euros a day. Trains are booked in second class. Receipts are uploaded "
    "within 30 days, and hotel rooms may cost up to 120 euros a night.",
    "The assembly point is the car park behind hall B. Fire drills are held twice a year. The safety officer is Jonas "
    "Weber, who can be reached at extension 4417.",
)
PASSAGES = [Segment(text) for text in TEXTS]
QUESTIONS = ("How many days of leave are paid?", "How high is the allowance?", "Who is the safety officer?")
EVERYWHERE = Policy(rungs=False)


def ask(llm: LLM, passages: list[Segment]) -> None:
    """Prints what happened to each passage of a prompt, and what was computed for it."""
    report = llm.generate(Prompt(passages, QUESTIONS[0]), SamplingParams(max_tokens=16)).report
    print("   " + ", ".join(one.reason or one.outcome for one in report.segments))
    print(f"   {report.computed_tokens} tokens computed for a prompt of {report.prompt_tokens}")


def divergence(llm: LLM, policy: Policy) -> float:
    """Of the next token from full recompute, in nats: a mean over the answers to three questions."""
    found = [llm.compare(Prompt(PASSAGES, question), policy=policy) for question in QUESTIONS]
    return sum(one.segments.kl for one in found) / len(found)


with LLM(*sys.argv[1:2], primer=PRIMER) as llm:
    print("three passages, each behind the rung that fits its place")
    ask(llm, PASSAGES)
    print("warmed, and asked in another order")
    llm.warm(PASSAGES)
    ask(llm, PASSAGES[1:] + PASSAGES[:1])
    print("and in a third one")
    ask(llm, PASSAGES[::-1])
    print(f"\ndivergence from full recompute: {divergence(llm, Policy()):.3g} nats behind rungs,")
    print(f"{divergence(llm, EVERYWHERE):.3g} behind the middle one for all places")
