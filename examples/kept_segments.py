"""Segments that outlive the process: a store on disk, namespaces, times to live, and forgetting.

python examples/kept_segments.py            the bundled demo model
python examples/kept_segments.py FOLDER     a checkpoint of your own
"""

import sys
import tempfile

from hypic import LLM, Prompt, SamplingParams, Segment

HANDBOOK = (
    "Norvale Instruments builds weather stations for farms, schools and harbours. The company was founded in 1987 by "
    "Ingrid Solberg in a former boathouse. Its headquarters are in Brannhaven, and about 140 people work there today."
)
PROFILE = (
    "The user is called Petra Lindqvist. She is the head of the workshop, prefers short answers, and has asked before "
    "about spare parts for the anemometers that were delivered to the harbour of Brannhaven in the spring."
)


def ask(llm: LLM, namespace: str) -> None:
    """The handbook is everybody's; the profile, the question and the answer are one user's."""
    segments = [
        Segment(HANDBOOK, source="handbook.md"),
        Segment(PROFILE, name="profile", namespace=namespace, ttl_s=3600),
    ]
    prompt = Prompt(segments, "Who founded Norvale Instruments?", namespace=namespace)
    out = llm.generate(prompt, SamplingParams(max_tokens=16))
    told = ", ".join(f"{s.source or s.name} {s.outcome} {s.tier or ''} {s.reason}".strip() for s in out.report.segments)
    print(f"{namespace}: {told}; {out.report.computed_tokens} of {out.report.prompt_tokens} tokens computed")


with tempfile.TemporaryDirectory() as folder:
    store = f"disk://{folder}?size=1GiB"
    with LLM(*sys.argv[1:2], store=store) as llm:
        ask(llm, "petra")
        ask(llm, "petra")
        llm.flush()
    print("another process")
    with LLM(*sys.argv[1:2], store=store) as llm:
        ask(llm, "petra")
        ask(llm, "oskar")
        print(llm.forget(namespace="petra"))
        ask(llm, "petra")
