"""Questions over a few passages with LangChain: every retrieved passage is a segment, computed once.

    python examples/langchain_rag.py
    python examples/langchain_rag.py --model path/to/checkpoint "When was the Alpha mill built?"

The second question retrieves passages that the first one has already used, in another order; the
table shows what was computed and what was reused. (rungs=False keeps each passage once for all places, as any model
without rungs in its primer does; the demo model has some, and is closer to full recompute with them.)
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

from hypic import Policy
from hypic.integrations.langchain import ChatHypic, DocumentsPlaceholder, HypicRetriever

TEXTS = {
    "alpha.md": "The Alpha mill was built in 1871 on the river Lenne by Ada Perkins, who had learned the trade in "
    "Leeds. It spun wool for three generations and closed in 1954, when the new road took its water.",
    "beta.md": "The Beta bridge was opened in 1902 and carries two tracks over the Lenne, a mile below the Alpha "
    "mill. Its engineer, Tom Okafor, tested it by parking eleven locomotives on it overnight.",
    "gamma.md": "The Gamma dam was finished in 1931. It holds nine million cubic metres of the Lenne and lights the "
    "town; the Beta bridge had to be raised by two metres for it.",
}
QUESTIONS = ("When was the Alpha mill built?", "Which bridge stands below the mill on the Lenne?")


@dataclass(frozen=True)
class Passage:
    id: str
    text: str
    source: str


@dataclass(frozen=True)
class Hit:
    passage: Passage
    score: float


class WordIndex:
    """Ranks passages by the words they share with a query; ``hypic_retriever`` has real indexes."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = [(passage, Counter(_words(passage.text))) for passage in passages]

    def search(self, query: str, k: int) -> list[Hit]:
        hits = [Hit(passage, sum(words[w] for w in _words(query))) for passage, words in self._passages]
        return sorted(hits, key=lambda hit: -hit.score)[:k]


def _words(text: str) -> list[str]:
    return re.findall(r"\w{4,}", text.lower())


def build(chat: ChatHypic) -> Any:
    """A chain from a question to ``{"question", "context", "answer"}``, the answer with its usage and report."""
    retriever = HypicRetriever(index=WordIndex([Passage(f"{name}#0", text, name) for name, text in TEXTS.items()]), k=3)
    prompt = ChatPromptTemplate(
        [("system", "Answer from the passages, in one sentence."), DocumentsPlaceholder("context", tail="{question}")]
    )
    context = RunnableLambda(lambda inputs: inputs["question"]) | retriever
    return RunnablePassthrough.assign(context=context) | RunnablePassthrough.assign(answer=prompt | chat)


def show(question: str, answer: AIMessage) -> None:
    report = answer.response_metadata["hypic"]
    print(f"\n{question}\n  {answer.text.strip()}")
    for segment in report["segments"]:
        print(f"  {segment['name']:<12} {segment['outcome']:<8} {segment['num_tokens']:>5} tokens  {segment['reason']}")
    print(f"  computed {report['computed_tokens']} prompt tokens, reused {report['reused_tokens']}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", help="checkpoint folder or name; without it the bundled demonstration model")
    options = parser.parse_args(arguments)
    chat = ChatHypic(model=options.model, temperature=0, max_tokens=48, policy=Policy(rungs=False))
    chain = build(chat)
    for question in options.questions:
        show(question, chain.invoke({"question": question})["answer"])
    chat.close()


if __name__ == "__main__":
    main()
