"""Questions on real text: encyclopedia summaries, country facts and dictionary glosses.

The pairs come from rules, each kept only because its pairs were read and found mostly right. The answer is always a
literal part of the passage, except where a description is given and the title asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from hypic_apps.train.corpus import Article, Country, Gloss
from hypic_apps.train.passages import Ask, Passage
from hypic_apps.train.sentences import first_sentence

NAME = r"((?:[A-Z][\w'’\-]+|[A-Z]\.)(?: (?:[A-Z][\w'’\-]+|[A-Z]\.|de|von|van|der|la|of|the|[IVX]+))*(?<=\w))"
CLAUSE_END = re.compile(
    r"(,(?!\d)| that | which | who | whose | where | when | while |; | and (?:is|was|are|has)\b| – | — |\. |\.$)"
)
LIVED = re.compile(r"\((?:c\. )?(\d{3,4})[–-](\d{3,4})\)")
BORN = re.compile(r"\(born (\d{4})\)")
TITLE = r"(?:the )?(?:[A-Z][\w\-]+ (?:[A-Z][\w\-]+ )?(?:(?!and )[a-z\-]+ ){1,3})?"
BY_VERB = {
    "directed|film": "directed", "written|novel|play|poem|book|story|essay": "wrote",
    "composed|opera|symphony": "composed",
    "painted|painting|fresco": "painted", "invented": "invented", "discovered": "discovered", "founded": "founded",
    "designed": "designed", "created": "created", "built": "built", "developed": "developed", "published": "published",
}  # fmt: skip
MADE = r"\b(founded|established|built|completed|launched|released|published|formed|created|introduced|opened|signed)\b"
WHEN = re.compile(MADE + r"(?: \w+){0,3} in (?:the year |early |late |[A-Z]\w+ )?(\d{4})\b")
SIMPLE = {
    r"\b(?:Its|[Tt]he) capital(?: city)?(?: and (?:largest|most populous) city)?(?: (?:of|in) [A-Z]\w+)? is "
    + NAME: "What is the capital of {}?",
    r"\bborn in " + NAME: "Where was {} born?",
    r"\bnative to (.+)": "Where is {} native to?",
    r"\bmember of the (.+)": "What is {} a member of?",
    r"\bbest known for (.+)": "What is {} best known for?",
    r"\b(?<!best )known for (.+)": "What is {} known for?",
    r"\batomic number (?:of )?(\d+)": "What is the atomic number of {}?",
    r"\bsymbol (?:is )?([A-Z][a-z]?)\b": "What is the symbol of {}?",
    r"\bpopulation of (?:about |around |approximately |over |more than |nearly )?([\d,]+(?:\.\d+)?(?: million| billion)?)": "What is the population of {}?",  # noqa: E501
    r"\bflows? (?:generally |north |south |east |west )*through (.+)": "What does {} flow through?",
    r"\bconsists? of (.+)": "What does {} consist of?",
    r"\bused (?:primarily |mainly |widely |commonly )?(for .+|to .+)": "What is {} used for?",
    r"\bcaused by (.+)": "What causes {}?",
    r"\bnamed (?:after|in honou?r of) (.+)": "What is {} named after?",
    r"\bserved as (the .+)": "What did {} serve as?",
    r"\bwon (the .+)": "What did {} win?",
    r"\breceived (the .+)": "What did {} receive?",
    r"\blocated (in .+|on .+|at .+)": "Where is {} located?",
    r"\bheadquartered (in .+)": "Where is {} headquartered?",
    r"\bderived from (.+)": "What is {} derived from?",
    r"\bofficially (?:known as )?(the [A-Z][\w ]+)": "What is the official name of {}?",
}
RULES = tuple((re.compile(pattern), form) for pattern, form in SIMPLE.items())


def base_title(title: str) -> str:
    """The title without the part in brackets that tells it from others."""
    return re.sub(r" \(.*\)$", "", title)


def called(article: Article) -> str:
    """What a question calls the thing of an article."""
    name = base_title(article.title)
    return f"the {name}" if article.text.startswith(f"The {name}") else name


def clip(text: str) -> str:
    """Text up to the end of its clause, without trailing marks."""
    found = CLAUSE_END.search(text)
    return (text[: found.start()] if found else text).strip(' ."“”,;')


def article_asks(article: Article) -> Iterator[Ask]:
    """All pairs of one article with its description."""
    name, text = base_title(article.title), article.text
    asked = called(article)
    yield from _definition(article, asked)
    yield from _description(article, name)
    both = f"{text[:260]} {article.description}"
    for verb, past in BY_VERB.items():
        found = re.search(rf"\b(?:{verb})(?: and \w+)? by {TITLE}{NAME}", both)
        if found and found.group(1) != name and " " in found.group(1):
            yield Ask("natural", f"Who {past} {asked}?", found.group(1))
            break
    found = WHEN.search(text)
    if found and article.topic != "People":
        yield Ask("natural", f"When was {asked} {found.group(1)}?", found.group(2))
    for pattern, form in RULES:
        found = pattern.search(text)
        answer = clip(found.group(1)) if found else ""
        if answer and 1 < len(answer) <= 80 and answer != name:
            yield Ask("natural", form.format(asked), answer)


def _definition(article: Article, name: str) -> Iterator[Ask]:
    opening = article.text[:300]
    found = re.search(r"\b(is|was|are|were) ((?:an?|the|any|one of) .+)", opening)
    if found is None:
        return
    answer = clip(found.group(2))
    if 3 < len(answer) < 90 and answer in article.text:
        person = article.topic == "People"
        yield Ask("natural", f"{'Who' if person else 'What'} {found.group(1)} {name}?", answer)


def _description(article: Article, name: str) -> Iterator[Ask]:
    text = article.description
    lived, born = LIVED.search(text), BORN.search(text)
    if lived:
        yield Ask("natural", f"When was {name} born?", lived.group(1))
        yield Ask("natural", f"When did {name} die?", lived.group(2))
    if born:
        yield Ask("natural", f"When was {name} born?", born.group(1))
    if len(text) > 12 and name in article.text and name.lower() not in text.lower():
        lowered = (
            text
            if re.match(r"[A-Z]{2}|[A-Z]\w+ [A-Z]|\d|[A-Z]\w*(?:ish|an|ese|ch|k)\b", text)
            else text[0].lower() + text[1:]
        )
        yield Ask(
            "natural", f"Which {'person' if article.topic == 'People' else 'thing'} is described as: {lowered}?", name
        )


def article_passage(article: Article, asks: Sequence[Ask], r: Random) -> Passage:
    """An article as a passage, with or without its title and description; keeps the ``asks`` that it then answers.

    Its first sentence is that of the article itself, behind title and description.
    """
    described = bool(article.description) and r.random() < 0.5
    name, text = article.title, article.text
    if described:
        head = r.choice(
            [
                f"{name}: {article.description}. ",
                f"{name}\n{article.description}.\n\n",
                f"# {name}\n\n{article.description}. ",
            ]
        )
    else:
        head = r.choice(["", "", f"{name}: ", f"{name}\n\n", f"# {name}\n\n"])
    body = text if r.random() < 0.6 else _cut(text, r.randint(150, 600))
    kept = tuple(
        a
        for a in asks
        if a.answer in head + body
        and (described or not a.question.startswith("When") or not a.question.endswith((" born?", " die?")))
    )
    return Passage(head + body, first_sentence(body), kept)


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    end = text.rfind(". ", 0, length)
    return text[: end + 1] if end > 80 else text


def country_passage(country: Country, r: Random) -> Passage:
    """A country's facts as a list of fields, or half of the time with a paragraph in front."""
    facts = r.sample(country.facts, min(len(country.facts), r.randint(4, 12)))
    mark = r.choice(["", "- "])
    rows = "\n".join(f"{mark}{key}: {value}" for key, value in facts)
    head = r.choice([f"{country.name} (2015)", f"# {country.name}", f"{country.name}"])
    asks = tuple(
        Ask("natural", r.choice([f"{country.name}: {k}?", f"What is the {k.lower()} of {country.name}?"]), v)
        for k, v in facts
    )
    return Passage(f"{head}\n{rows}", head, asks, about=country.name)


def gloss_passage(glosses: Sequence[Gloss], r: Random) -> Passage:
    """A few words and what they mean."""
    chosen = {gloss.word: gloss for gloss in r.sample(glosses, r.randint(3, 8))}
    joint = r.choice([": ", " means ", " – "])
    rows = [f"{word}{joint}{gloss.text}{r.choice(['.', ''])}" for word, gloss in chosen.items()]
    asks = tuple(
        Ask("natural", r.choice([f"What does {w} mean?", f"What is the meaning of {w}?", f"Define {w}."]), g.text)
        for w, g in chosen.items()
    )
    return Passage(r.choice(["\n", "\n", "; "]).join(rows), rows[0], asks)
