"""More questions on encyclopedia summaries, for training alone: sentence by sentence, where the form makes it safe.

A sentence whose subject is the article's own thing, by name or pronoun, is turned into a question for the thing, for
the year or the person it names, or gets a gap. The answer always stands in the text; what no rule knows is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from random import Random

from hypic_apps.train.corpus import Article
from hypic_apps.train.natural import CLAUSE_END, NAME, base_title, clip
from hypic_apps.train.passages import Ask

SENTENCE_END = re.compile(r"(?<=[a-z0-9)\"][.!?])\s+(?=[A-Z])")
PRONOUN = r"(?:It|He|She)"
# Finite verbs with which a predicate begins; any other word in -ed counts too.
VERB = (
    r"(?:is|was|has|had|became|won|wrote|led|held|made|took|gave|began|ran|grew|rose|lies|stands|flows|covers|contains|"
    r"includes|borders|produces|consists|uses|lives|plays|served|works|taught|fought|sold|built|left|"
    r"(?!need|speed|indeed)[a-z]{3,}ed)"
)
PREDICATE = re.compile(rf"^({VERB}\b .+)")
MONTH = "(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DATE = rf"(?:(?:\d{{1,2}} )?{MONTH}(?: \d{{1,2}},?)? )?\d{{4}}"
DID_IN = re.compile(
    rf"^(was|were) ((?!in\b)\w+(?:ed|en|wn|lt|ld|nt|un|de|id)\b(?: [^,;.()]{{1,60}}?)?) (in|on) ({DATE})\b"
)
OTHER_DID_IN = re.compile(r"^([A-Z][^,;.()]{3,60}?) " + DID_IN.pattern[1:])
DOER = re.compile(
    rf"^(?!The |In |On |At |By ){NAME} ((?:became|won|wrote|led|discovered|founded|invented|developed|designed|built|"
    r"composed|painted|directed|introduced|proposed|proved|described|published|defeated|conquered|established|ruled|"
    r"commanded|married|succeeded|explored|coined|created|starred|produced|signed|declared|launched)"
    r"(?! (?:as|by|with)\b) .+)"
)
POINTING = re.compile(
    r"\b(?:[Ii]ts?|[Hh]is|[Hh]ers?|[Tt]heirs?|[Tt]his|[Tt]hese|[Tt]hose|[Tt]hey|[Ss]he|[Hh]e|them|him)\b"
)
DONE_BY = re.compile(rf"^(was|were) ((?!in\b)\w+(?:ed|en|wn|lt|un)\b(?: [^,;.()]{{1,40}}?)?) by {NAME}")
HOW_MANY = re.compile(r"\b(?:has|had|have|contains|includes) (?:about |over |around |nearly |more than )?(\d[\d,.]*(?: million| billion)?|two|three|four|five|six|seven|eight|nine|ten|twelve) ([a-z]{3,}(?: [a-z]{3,})?s)\b(?! of the)")  # fmt: skip # noqa: E501
GAP = re.compile(rf"\b(\d{{4}}|\d[\d,]*\d(?:\.\d+)?(?: million| billion)?)\b(?![.,]?\d)|(?<=[a-z,] ){NAME}")
GAP_FORMS = (
    "Fill the gap: {}", "What stands in the gap? {}", "Complete: {}", "Which words are missing? {}", "{} What is ___?",
)  # fmt: skip
FOR_THING = ("{w} {p}?", "{w} {p}?", "Which {k} {p}?", "Name the {k} that {p}.", "Tell me {l} {p}.", "{l} {p}")


CUT = re.compile(r"\b(?:No|St|Dr|Mr|vs|[A-Z])$")


def asks_of(article: Article, r: Random) -> Iterator[tuple[str, Ask]]:
    """(sentence, question on it) of an article; a gap for every seventh sentence or so."""
    name = base_title(article.title)
    asked = f"the {name}" if article.text.startswith(f"The {name}") else name
    for number, sentence in enumerate(SENTENCE_END.split(article.text)):
        predicate = _predicate(sentence, name)
        if predicate and name in article.text:
            found = _of_predicate(predicate, asked, name, article.topic == "People", number, r)
        else:
            found = _of_others(sentence, name, r)
        yield from ((sentence, ask) for ask in found)
        if len(sentence) < 260 and r.random() < 0.15:
            yield from ((sentence, ask) for ask in _gap(sentence, name, r))


def _predicate(sentence: str, name: str) -> str:
    """What a sentence says of the thing: all behind its subject, or nothing where the subject is another."""
    subject = re.match(rf"(?:(?:The |An? )?{re.escape(name)}|{PRONOUN}) (?:also |then |later |soon |often )?", sentence)
    found = PREDICATE.match(sentence[subject.end() :]) if subject else None
    return found.group(1) if found else ""


def _of_predicate(predicate: str, asked: str, name: str, is_person: bool, number: int, r: Random) -> Iterator[Ask]:
    done = DID_IN.match(predicate)
    if done:
        yield Ask("natural", f"{_when(done.group(3), r)} {done.group(1)} {asked} {done.group(2)}?", done.group(4))
    by = DONE_BY.match(predicate)
    if by and " " in by.group(3) and by.group(3) != name:
        forms = f"Who {by.group(1)} {asked} {by.group(2)} by?", f"By whom {by.group(1)} {asked} {by.group(2)}?"
        yield Ask("natural", r.choice(forms), by.group(3))
    counted = HOW_MANY.search(predicate)
    if counted:
        forms = f"How many {counted.group(2)} does {asked} have?", f"{asked}: how many {counted.group(2)}?"
        yield Ask("natural", r.choice(forms), counted.group(1))
    clause = clip(predicate) if CLAUSE_END.search(predicate) else predicate.rstrip(".")
    if number and 3 < len(clause.split()) < 22 and name not in clause and not POINTING.search(clause):
        if clause.count('"') % 2 or CUT.search(clause):
            return
        yield _for_thing(clause, name, is_person, r)


def _of_others(sentence: str, name: str, r: Random) -> Iterator[Ask]:
    """What a sentence says of something else: when it happened, and who did it."""
    done = OTHER_DID_IN.match(sentence)
    if done and not POINTING.search(done.group(1)):
        subject = done.group(1)[:1].lower() + done.group(1)[1:] if done.group(1).startswith("The ") else done.group(1)
        question = f"{_when(done.group(4), r).lower()} {done.group(2)} {subject} {done.group(3)}?"
        yield Ask("natural", f"{name}: {question}", done.group(5))
    doer = DOER.match(sentence)
    if doer and doer.group(1) != name and not POINTING.search(doer.group()):
        clause = clip(doer.group(2))
        if 3 < len(clause.split()) < 22 and clause.count('"') % 2 == 0 and not CUT.search(clause):
            yield Ask(
                "natural", r.choice(("Who {}?", "Who {}?", "Tell me who {}.", "who {}")).format(clause), doer.group(1)
            )


def _when(preposition: str, r: Random) -> str:
    return r.choice(("When", "When", "In which year" if preposition == "in" else "On which date"))


def _for_thing(clause: str, name: str, is_person: bool, r: Random) -> Ask:
    """The predicate is given and the thing asked for."""
    words = ("Who", "who", "person") if is_person else ("What", "what", "thing")
    form = r.choice(FOR_THING)
    for place, word in zip(("{w}", "{l}", "{k}"), words, strict=True):
        form = form.replace(place, word)
    return Ask("natural", form.replace("{p}", clause), name)


def _gap(sentence: str, name: str, r: Random) -> Iterator[Ask]:
    """A year, number or name of the sentence left out; a few words around it and the title are given."""
    found = [m for m in GAP.finditer(sentence) if m.start() > 12 and m.group() not in name and name not in m.group()]
    if not found:
        return
    gap = r.choice(found)
    before = sentence[: gap.start()].split()[-r.randint(4, 9) :]
    after = "".join(re.findall(r"\S*\s*", sentence[gap.end() :])[: r.randint(2, 6)])
    if sentence.count(gap.group()) == 1 and len(gap.group()) > 1:
        text = f"{' '.join(before)} ___{after.rstrip(' .,;')}"
        yield Ask("natural", f"{name}: {r.choice(GAP_FORMS).format(text)}", gap.group())
