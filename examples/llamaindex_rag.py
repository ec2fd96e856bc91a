"""Questions over a few passages with LlamaIndex: every retrieved node is a segment, computed once.

    python examples/llamaindex_rag.py
    python examples/llamaindex_rag.py --model path/to/checkpoint "When was the Alpha mill built?"

The second question retrieves nodes that the first one has already used, in another order; the table shows what was
computed and what was reused. (rungs=False keeps each node once for all places, as any model without rungs in its primer
does; the demo model has some, and is closer to full recompute with them.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from llama_index.core.callbacks import CallbackManager, CBEventType, EventPayload
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.query_engine import RetrieverQueryEngine

from hypic import Policy
from hypic.integrations.llamaindex import HypicLLM, HypicRetriever, SegmentSynthesizer
from hypic_retriever import Index

TEXTS = {
    "alpha.md": "The Alpha mill was built in 1871 on the river Lenne by Ada Perkins, who had learned the trade in "
    "Leeds. It spun wool for three generations and closed in 1954, when the new road took its water.",
    "beta.md": "The Beta bridge was opened in 1902 and carries two tracks over the Lenne, a mile below the Alpha "
    "mill. Its engineer, Tom Okafor, tested it by parking eleven locomotives on it overnight.",
    "gamma.md": "The Gamma dam was finished in 1931. It holds nine million cubic metres of the Lenne and lights the "
    "town; the Beta bridge had to be raised by two metres for it.",
}
QUESTIONS = ("When was the Alpha mill built on the Lenne?", "Which bridge stands below the mill on the Lenne?")


class Reports(BaseCallbackHandler):
    """Keeps the cache report of the last answer."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.last: dict[str, Any] = {}

    def on_event_start(
        self,
        event_type: CBEventType,
        payload: dict[str, Any] | None = None,
        event_id: str = "",
        parent_id: str = "",
        **kwargs: Any,
    ) -> str:
        return event_id

    def on_event_end(
        self, event_type: CBEventType, payload: dict[str, Any] | None = None, event_id: str = "", **kwargs: Any
    ) -> None:
        response = (payload or {}).get(EventPayload.RESPONSE)
        if event_type == CBEventType.LLM and response is not None:
            self.last = response.raw["hypic"]

    def start_trace(self, trace_id: str | None = None) -> None:
        pass

    def end_trace(self, trace_id: str | None = None, trace_map: dict[str, list[str]] | None = None) -> None:
        pass


def build(llm: HypicLLM) -> RetrieverQueryEngine:
    index = Index()
    index.add_documents(TEXTS)
    return RetrieverQueryEngine(HypicRetriever(index, k=3), SegmentSynthesizer(llm=llm))


def show(question: str, answer: str, report: dict[str, Any]) -> None:
    print(f"\n{question}\n  {answer.strip()}")
    for segment in report["segments"]:
        print(f"  {segment['name']:<12} {segment['outcome']:<8} {segment['num_tokens']:>5} tokens  {segment['reason']}")
    print(f"  computed {report['computed_tokens']} prompt tokens, reused {report['reused_tokens']}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", help="checkpoint folder or name; without it the bundled demonstration model")
    options = parser.parse_args(arguments)
    reports = Reports()
    settings = {"policy": Policy(rungs=False), "callback_manager": CallbackManager([reports])}
    llm = HypicLLM(model=options.model, temperature=0, max_tokens=48, **settings)
    engine = build(llm)
    for question in options.questions:
        show(question, str(engine.query(question)), reports.last)
    llm.close()


if __name__ == "__main__":
    main()
