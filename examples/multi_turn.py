"""A conversation: every turn computes only what is new in it, on top of the state in which the last turn ended.

python examples/multi_turn.py            the bundled demo model
python examples/multi_turn.py FOLDER     a checkpoint of your own
"""

import sys

from hypic import LLM, SamplingParams

PASSAGE = (
    "Norvale Instruments builds weather stations for farms, schools and harbours. The company was founded in 1987 by "
    "Ingrid Solberg in a former boathouse. Its headquarters are in Brannhaven, and about 140 people work there today."
)
QUESTIONS = ("Who founded Norvale Instruments?", "When was it founded?", "Where are its headquarters?")

with LLM(*sys.argv[1:2]) as llm:
    # A message of several blocks: all but the last are segments, the last is the question.
    blocks = [{"type": "text", "text": PASSAGE}, {"type": "text", "text": QUESTIONS[0]}]
    messages = [{"role": "user", "content": blocks}]
    for turn, question in enumerate(QUESTIONS):
        if turn:
            messages.append({"role": "user", "content": question})
        out = llm.chat(messages, SamplingParams(max_tokens=32))
        messages.append({"role": "assistant", "content": out.text})
        print(f"\nQ: {question}\nA: {out.text}")
        print(f"   {out.report.computed_tokens} tokens computed for a prompt of {out.report.prompt_tokens}")
