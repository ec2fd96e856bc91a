"""How an invented thing is written up: the same facts as an article, a card, a list, questions and answers, a notice.

A passage carries the questions that it answers. Only the first mention must be the name; later ones may be pronouns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from hypic_apps.train.frames import FRAMES, TAILS
from hypic_apps.train.schema import Relation, Split
from hypic_apps.train.words import article


@dataclass(frozen=True)
class Fact:
    """A thing of a kind, one of its relations, and the value."""

    kind: str
    subject: str
    relation: Relation
    value: str


@dataclass(frozen=True)
class Ask:
    """A question and its answer, both as plain text; ``kind`` names what it exercises, ``about`` what it rests on.

    ``starts`` are the places, in characters of the answer, at which the items of a list begin.
    """

    kind: str
    question: str
    answer: str
    about: tuple[Fact, ...] = field(default=(), compare=False)
    starts: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Passage:
    """A text, its first sentence, what can be asked about it, and the facts that it states; ``about`` is what a real
    one is about, as a question calls it."""

    text: str
    first: str
    asks: tuple[Ask, ...] = ()
    facts: tuple[Fact, ...] = field(default=(), compare=False)
    about: str = field(default="", compare=False)


PRONOUNS = {
    "person": ("She", "He"),
    "company": ("The company", "The firm", "It"),
    "handbook": ("The company",),
    "city": ("The city", "The town", "It"),
    "country": ("The country", "It"),
    "book": ("The book", "It"),
    "film": ("The film", "It"),
    "museum": ("It", "The building"),
    "project": ("The project", "It"),
    "product": ("The device", "It"),
    "river": ("The river", "It"),
    "mountain": ("The range", "It"),
    "festival": ("The event", "It"),
    "animal": ("The animal", "It"),
    "club": ("The club", "It"),
    "meeting": ("The meeting",),
}
WITHOUT_ARTICLE = re.compile(r"\b[Tt]he \{s\}")


def capitalise(text: str) -> str:
    """With a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def state(fact: Fact, subject: str, template: str, split: Split) -> str:
    """The sentence in which ``template`` states the fact of ``subject``, a name or a pronoun."""
    if subject != fact.subject:
        template = WITHOUT_ARTICLE.sub("{s}", template)
    return capitalise(inserted(inserted(template, "{o}", fact.value, split), "{s}", subject, split))


def inserted(template: str, place: str, name: str, split: Split) -> str:
    """The template with a name in its place; in training the article before it is as its sound asks (what is kept for
    measuring is frozen as it was)."""
    if split == "train":
        before = re.compile(rf"\b([aA])n? {re.escape(place)}")
        template = before.sub(rf"\1{article(name.lower())[1:]} {place}", template)
    return template.replace(place, name)


# Words that carry the grammar of a sentence; all others may be exchanged.
GRAMMAR = frozenset(
    "the a an of in on at by for from to with and or is are was were has have had be been it its this that which who "
    "whom whose what when where how why much many long does do did can could you me i it's as not no".split()
)
EXCHANGED_SENTENCES, EXCHANGED_QUESTIONS, FRAMED = 0.10, 0.05, 0.12
# Shares, in training, of wordings out of phrases, and of neighbouring sentences made one.
MORE_SAID, MORE_ASKED, JOINED = 0.2, 0.2, 0.15
# The share of labels in cards and tables that are another noun for the relation.
OTHER_LABEL = 0.4


def said(relation: Relation, split: Split, r: Random) -> str:
    """A statement template. In training some have a word exchanged for any other: then only the kind of value and the
    rest of the passage tell what is meant, which is how an unknown wording must be read."""
    own = split == "test" or not relation.more_said or r.random() > MORE_SAID
    template = r.choice(relation.said(split) if own else relation.more_said)
    return framed(exchanged(template, r, EXCHANGED_SENTENCES), r) if split == "train" else template


def framed(template: str, r: Random) -> str:
    """The template, now and then, as the part of a longer sentence."""
    if r.random() >= FRAMED:
        return template
    if template.endswith(".") and r.random() < 0.3:
        return template[:-1] + r.choice(TAILS)
    return r.choice(FRAMES).replace("{}", in_the_midst(template))


BEGIN_SMALL = frozenset(
    "The It In At For As With From Under She He By Our My Some There When What Where Nobody On After Although People "
    "An A All That This These Those If One Two Three Every Everybody Everyone Records Behind Once To Since According "
    "Because During Before They We You Its Her His Who Whoever Anyone Most Many Both Born Founded".split()
)


def in_the_midst(sentence: str) -> str:
    """The sentence as it stands behind other words: a small first letter unless it begins with a name."""
    begins_small = sentence.split(" ", 1)[0] in BEGIN_SMALL
    return sentence[:1].lower() + sentence[1:] if begins_small else sentence


def exchanged(template: str, r: Random, chance: float) -> str:
    """The template, by ``chance`` with one or two content words replaced by invented ones."""
    if r.random() >= chance:
        return template
    words = template.split(" ")
    content = [i for i, w in enumerate(words) if w.isalpha() and w.lower() not in GRAMMAR]
    for place in r.sample(content, min(len(content), r.randint(1, 2))):
        words[place] = made_up(r)
        if place and words[place - 1].lower() == "an":  # no invented word begins with a vowel
            words[place - 1] = words[place - 1][0]
    return " ".join(words)


def made_up(r: Random) -> str:
    """A word that no language has, of one to three syllables."""
    return "".join(r.choice("bdfgklmnprstvw") + r.choice("aeiou") for _ in range(r.randint(1, 3)))


NOUN_FORMS = ("What is the {n} of {s}?", "Give the {n} of {s}.", "{n} of {s}?", "Tell me the {n} of {s}.", "{s} {n}")


def asked(relation: Relation, split: Split, r: Random) -> str:
    """A question template."""
    own = split == "test" or not relation.more_asked or r.random() > MORE_ASKED
    return r.choice(relation.asked(split) if own else relation.more_asked)


def question(fact: Fact, split: Split, r: Random, *, impersonal: bool = False) -> str:
    """A question whose answer is the fact's value; ``impersonal`` leaves the subject out where the language allows."""
    if split == "train" and r.random() < 0.15 and fact.kind != "task":
        article = "the " if "the {s}" in fact.relation.questions[0] else ""
        form = r.choice(NOUN_FORMS)
        template = capitalise(form.replace("{n}", fact.relation.noun).replace("{s}", article + "{s}"))
    else:
        template = asked(fact.relation, split, r)
        if split == "train":
            template = exchanged(template, r, EXCHANGED_QUESTIONS)
    if impersonal:
        template = re.sub(r" (?:of|at|for|from) \{s\}", "", template).replace("{s}", "the company")
    return inserted(template, "{s}", fact.subject, split)


def ask(fact: Fact, split: Split, r: Random, *, impersonal: bool = False) -> Ask:
    """A one-hop question about the fact."""
    return Ask("1hop", question(fact, split, r, impersonal=impersonal), fact.value, (fact,))


def write(facts: Sequence[Fact], split: Split, r: Random, filler: Sequence[str], *, impersonal: bool = False) -> str:
    """A passage about the one subject of ``facts``, in a style drawn at random."""
    kind = facts[0].kind
    style = r.random()
    if kind == "task" or style < 0.68:
        return _article(facts, split, r, filler, impersonal=impersonal)
    if style < 0.80:
        return _card(facts, split, r)
    if style < 0.88:
        return _bullets(facts, split, r)
    if style < 0.94:
        return _dialogue(facts, split, r)
    return _notice(facts, split, r, filler)


def table(facts: Sequence[Fact], r: Random) -> str:
    """Several things with the same relations, a line each, under a heading; for training alone."""
    nouns = list({fact.relation.key: label(fact.relation, "train", r) for fact in facts}.values())
    bar, kind = r.choice([" | ", " | ", "; ", "\t"]), facts[0].kind
    rows: dict[str, list[str]] = {}
    for fact in facts:
        rows.setdefault(fact.subject, [capitalise(fact.subject)]).append(fact.value)
    head = bar.join(capitalise(x) for x in (r.choice([kind, "name"]), *nouns))
    return "\n".join([head, *(bar.join(row) for row in rows.values())])


def label(relation: Relation, split: Split, r: Random) -> str:
    """What a card or table calls the relation; in training now and then any noun that it goes by."""
    if split == "test" or not relation.nouns or r.random() >= OTHER_LABEL:
        return relation.noun
    return r.choice(relation.nouns)


def side_by_side(facts: Sequence[Fact], split: Split, r: Random) -> str:
    """Several things in one text, each named in every sentence about it."""
    lines = [sentences([fact], split, r)[0] for fact in facts]
    mark = r.choice(["", "", "- "])
    return "\n".join(mark + line for line in lines) if mark else " ".join(joined(lines, r))


def sentences(facts: Sequence[Fact], split: Split, r: Random, *, impersonal: bool = False) -> list[str]:
    """One sentence per fact; the first names the subject."""
    name, pronoun = facts[0].subject, r.choice(PRONOUNS.get(facts[0].kind, ("It",)))
    family = name.split()[-1] if facts[0].kind == "person" else name
    short = r.choice([pronoun, family, name])
    out: list[str] = []
    for fact in facts:
        template = said(fact.relation, split, r)
        subject = name
        if out and fact.kind != "task" and r.random() < 0.6:
            begins = template.startswith(("{s} ", "The {s} "))
            subject = short if begins or short not in ("She", "He", "It") else family
            subject = subject if begins or subject in (name, family) else subject[:1].lower() + subject[1:]
        if impersonal and fact.kind == "handbook" and (out or r.random() < 0.5):
            template = re.sub(r",? (?:of|at|from) \{s\},?", "", template).replace("At {s}, ", "")
            subject = "the company"
        out.append(state(fact, subject, template, split))
    return out


def _article(facts: Sequence[Fact], split: Split, r: Random, filler: Sequence[str], *, impersonal: bool) -> str:
    body: list[str] = []
    for sentence in sentences(facts, split, r, impersonal=impersonal):
        body.append(sentence)
        if filler and r.random() < 0.25:
            body.append(r.choice(filler))
    text = " ".join(joined(body, r) if split == "train" else body)
    if impersonal or (r.random() < 0.4 and facts[0].kind != "task"):
        return _title(facts[0], r) + text
    return text


def joined(body: Sequence[str], r: Random) -> list[str]:
    """The sentences, of which now and then two neighbours are made one."""
    out = [*body[:1]]
    for sentence in body[1:]:
        if out[-1].endswith(".") and r.random() < JOINED:
            out[-1] = out[-1][:-1] + r.choice(["; ", ", and ", ", while ", ", but ", " - "]) + in_the_midst(sentence)
        else:
            out.append(sentence)
    return out


def _title(fact: Fact, r: Random) -> str:
    name = capitalise(fact.subject)
    if fact.kind == "handbook":
        heading = r.choice(["Employee handbook", "Handbook", "Staff rules", "Working at", "Rules of work:"])
        name = (
            f"{heading} {name}"
            if heading.endswith(("at", ":"))
            else r.choice([f"{heading} of {name}", f"{name}: {heading}"])
        )
    return r.choice([f"{name}: ", f"{name}\n\n", f"# {name}\n\n", f"{name}\n", f"## {name}\n\n"])


def _card(facts: Sequence[Fact], split: Split, r: Random) -> str:
    name, mark = capitalise(facts[0].subject), r.choice(["", "- ", "* "])
    joint = r.choice([": ", ": ", " = ", " | "])
    rows = [f"{mark}{capitalise(label(fact.relation, split, r))}{joint}{fact.value}" for fact in facts]
    return f"{r.choice(['', '# '])}{name}\n" + "\n".join(rows)


def _bullets(facts: Sequence[Fact], split: Split, r: Random) -> str:
    lines = sentences(facts, split, r)
    head = r.choice([f"About {facts[0].subject}:", capitalise(facts[0].subject), f"Notes on {facts[0].subject}"])
    return head + "\n" + "\n".join(f"- {line}" for line in lines)


def _dialogue(facts: Sequence[Fact], split: Split, r: Random) -> str:
    ask_mark, answer_mark = r.choice([("Q: ", "A: "), ("", ""), ("Question: ", "Answer: ")])
    pairs = (
        f"{ask_mark}{question(fact, split, r)}\n"
        f"{answer_mark}{state(fact, fact.subject, r.choice(fact.relation.said(split)), split)}"
        for fact in facts
    )
    return "\n".join(pairs)


def _notice(facts: Sequence[Fact], split: Split, r: Random, filler: Sequence[str]) -> str:
    lines = " ".join(sentences(facts, split, r))
    opening = r.choice(["Dear all,\n", "Hello,\n", "News: ", "For your information: ", "Memo\n\n", "Good morning,\n"])
    closing = r.choice(["", "", "\nKind regards", "\nBest wishes", " " + r.choice(filler) if filler else ""])
    return opening + lines + closing


def named(fact: Fact) -> str:
    """The subject as it stands within a sentence: some kinds take an article."""
    return ("the " if "the {s}" in fact.relation.questions[0] else "") + fact.subject
