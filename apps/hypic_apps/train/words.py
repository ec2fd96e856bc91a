"""Forms of English words: regular ones made, irregular verbs known so that no wrong form is made of them."""

from __future__ import annotations

import re

# Verbs whose past is not formed with -ed; without the ones that a prefix makes of them, which ``is_regular`` finds.
IRREGULAR = frozenset(
    "arise awake be bear beat become begin bend bet bind bite bleed blow break breed bring broadcast build burst buy "
    "cast catch choose cling come cost creep cut deal dig do draw drink drive eat fall feed feel fight find flee fling "
    "fly forbid forget forgive freeze get give go grind grow hang have hear hide hit hold hurt keep know lay lead lean "
    "leap leave lend let lie light lose make mean meet pay put quit read rend rid ride ring rise run say see seek sell "
    "send set shake shed shine shoot show shrink shut sing sink sit sleep slide sling slit sow speak speed spend spin "
    "split spread spring stand steal stick sting strew stride strike string strive swear sweep swell swim swing take "
    "teach tear tell think throw thrust tread wake wear weave weep win wind wring write".split()
)
PREFIX = re.compile(r"^(?:be|for|fore|in|mis|off|out|over|re|un|under|up|with)(?=\w{3})")
# A stressed last syllable of one short vowel and one consonant doubles it.
DOUBLES = re.compile(r"^[^aeiou]*[aeiou][bdgklmnprt]$|(?:mit|fer|pel|cur|gret|bat|mat)$")
NOT_DOUBLED = re.compile(r"^[^aeiou]*[aeiou]k$|(?:suffer|offer|differ)$")


def is_regular(verb: str) -> bool:
    """Whether the verb's past ends in -ed."""
    return verb not in IRREGULAR and PREFIX.sub("", verb) not in IRREGULAR


def past(verb: str) -> str:
    """The regular past of a verb."""
    if verb.endswith("e"):
        return verb + "d"
    return re.sub(r"(?<=[^aeiou])y$", "i", _doubled(verb)) + "ed"


def third(verb: str) -> str:
    """The third person of a verb."""
    return plural(verb)


def present_participle(verb: str) -> str:
    """The form in -ing."""
    return (verb[:-1] if re.search(r"[^eoy]e$", verb) else _doubled(verb)) + "ing"


def plural(noun: str) -> str:
    """The regular plural of a noun."""
    if re.search(r"(s|x|z|ch|sh)$", noun):
        return noun + "es"
    return noun[:-1] + "ies" if re.search(r"[^aeiou]y$", noun) else noun + "s"


def article(word: str) -> str:
    """``a`` or ``an``, by the letter or the number the word begins with."""
    return "an" if re.match(r"(?!uni|use|usu|eu|one)[aeiou]|hour|honou?r|heir|8|1[18](?!\d)", word) else "a"


def _doubled(verb: str) -> str:
    return verb + verb[-1] if DOUBLES.search(verb) and not NOT_DOUBLED.search(verb) else verb
