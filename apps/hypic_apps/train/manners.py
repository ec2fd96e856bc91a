"""What stands around questions: system prompts, ways to lead up to a question, and labels before passages."""

from __future__ import annotations

from random import Random

SYSTEMS = (
    "You answer from the passages.", "Answer the question with words from the text.", "You are a helpful assistant.",
    "Use only the documents given.", "Answer briefly.", "You answer questions about documents. Be short and exact.",
    "Read the passages and answer.", "If the passages do not say it, answer: not stated.",
    "You answer questions from the given passages. Keep it short.", "Answer from the documents, and only from them.",
)  # fmt: skip
WRAPPERS = (
    "Question: {}", "{} Answer briefly.", "{}\nAnswer:", "Answer from the passages: {}", "Please tell me: {}",
    "I have a question: {}", "{} Keep it short.", "Q: {}", "One more question: {}", "According to the passages: {}",
    "Hello! {}", "{} Thanks.", "From the text above: {}", "Quick question: {}", "{} Just the answer, please.",
    "I read all of this and still don't know: {}", "Look it up: {}", "{} Only use what is written above.",
)  # fmt: skip
LABELS = ("Source {}:", "[{}]", "Passage {}:", "Document {}")


def wrapped(question: str, r: Random) -> str:
    """The question as it is, mostly, or led up to, or typed in haste."""
    chance = r.random()
    if chance < 0.78:
        return question
    if chance < 0.90:
        return r.choice(WRAPPERS).replace("{}", question)
    return question.rstrip("?").lower() if chance < 0.96 else question[:1].lower() + question[1:].rstrip("?.")


def labels(number: int, r: Random) -> tuple[str, ...]:
    """Labels for as many passages; mostly none."""
    if r.random() > 0.06:
        return ()
    form = r.choice(LABELS)
    return tuple(form.format(i + 1) for i in range(number))
