"""The registry: nothing is lost, known texts are found, and by the stated rule only."""

import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypic.errors import ConfigError
from hypic.registry import Match, Registry
from hypic.types import Segment

SKILL = "Always answer in one short sentence, and name the passage you used."
PAGE = "The Alpha mill was built in 1871 on the river Lenne and closed in 1954."
OTHER = "The Beta bridge was opened in 1902; it carries two tracks and a footpath."


def joined(pieces: list[Segment | str]) -> str:
    return "".join(p if isinstance(p, str) else p.text for p in pieces)


def names(pieces: list[Segment | str]) -> list[str | None]:
    return [None if isinstance(p, str) else p.name or p.text for p in pieces]


def test_finds_known_texts_with_their_labels() -> None:
    registry = Registry()
    page = Segment(PAGE, name="alpha#1", source="alpha.md")
    assert registry.register([page, Segment(SKILL, kind="skill", name="brief")]) == 2
    pieces = registry.split(f"Rules: {SKILL}\n\n<doc>{PAGE}</doc>\nWhen?")
    assert names(pieces) == [None, "brief", None, "alpha#1", None]
    assert pieces[0::2] == ["Rules: ", "\n\n<doc>", "</doc>\nWhen?"]
    assert pieces[3] == page


def test_a_text_is_known_without_its_outer_white_space() -> None:
    registry = Registry()
    registry.register(f"\n\n  {PAGE} \n")
    assert names(registry.split(PAGE)) == [PAGE]
    assert registry.split(f"x\n{PAGE}\n") == ["x\n", Segment(PAGE), "\n"]


def test_no_match_inside_a_word() -> None:
    registry = Registry()
    registry.register(PAGE[:-1])
    assert names(registry.split(PAGE)) == [PAGE[:-1], None]
    for text in (PAGE[:-1] + "7 or so", "x" + PAGE):
        assert registry.split(text) == [text]


def test_the_longest_wins_and_a_shorter_one_fills_what_is_left() -> None:
    start, middle, end = ("first " * 10).strip(), ("second " * 10).strip(), ("third " * 30).strip()
    registry = Registry()
    registry.register([start, f"{start} {middle}", f"{middle} {end}"])
    assert registry.split(f"{start} {middle} {end}") == [Segment(start), " ", Segment(f"{middle} {end}")]
    assert registry.split(f"{start} {middle}") == [Segment(f"{start} {middle}")]


def test_find_reports_the_borders() -> None:
    registry = Registry()
    registry.register(Segment(PAGE, name="a"))
    text = f"{PAGE} {PAGE}"
    assert registry.find(text) == (
        Match(0, len(PAGE), Segment(PAGE, name="a")),
        Match(len(PAGE) + 1, len(text), Segment(PAGE, name="a")),
    )


def test_namespaces_do_not_see_each_other() -> None:
    registry = Registry()
    registry.register([PAGE, Segment(OTHER, namespace="b")], namespace="a")
    assert names(registry.split(PAGE, "a")) == [PAGE]
    assert registry.split(PAGE) == registry.split(PAGE, "b") == [PAGE]
    assert registry.split(OTHER, "a") == [OTHER]
    assert registry.split(OTHER, "b") == [Segment(OTHER, namespace="b")]


def test_what_is_not_registered() -> None:
    registry = Registry(min_chars=40, max_bytes=5000)
    assert registry.register(["short", " " * 100, Segment(PAGE, cache=False), "x" * 5000]) == 0
    assert len(registry) == registry.num_bytes == 0
    assert registry.split("") == []


def test_registering_again_renews_labels_and_weighs_nothing() -> None:
    registry = Registry()
    registry.register(Segment(PAGE, name="old"))
    before = registry.num_bytes
    registry.register(Segment(PAGE, name="new"))
    assert names(registry.split(PAGE)) == ["new"]
    assert (len(registry), registry.num_bytes) == (1, before)


def test_forget_by_text_and_label() -> None:
    registry = Registry()
    registry.register([Segment(PAGE, name="a", source="x"), Segment(OTHER, name="b", source="x")])
    registry.register(Segment(PAGE, name="a", source="x", namespace="n"))
    assert registry.forget(name="a", namespace="n") == 1
    assert registry.forget(f" {OTHER} ") == 1
    assert names(registry.split(f"{PAGE} {OTHER}")) == ["a", None]
    assert registry.forget(source="x") == 1
    assert registry.forget(source="x") == 0
    assert (len(registry), registry.num_bytes) == (0, 0)
    with pytest.raises(ConfigError, match="clear"):
        registry.forget()


def test_the_least_recently_used_goes_first() -> None:
    texts = [f"{n:>03} is the number of this page, and that is all it says." for n in range(5)]
    weight = Registry()
    weight.register(texts[0])
    registry = Registry(max_bytes=3 * weight.num_bytes)
    registry.register(texts[:3])
    assert isinstance(registry.split(texts[0])[0], Segment)  # used: now the second goes first
    registry.register(texts[3])
    known = [isinstance(registry.split(text)[0], Segment) for text in texts]
    assert known == [True, False, True, True, False]
    assert registry.num_bytes <= registry.max_bytes
    registry.clear()
    assert registry.split(texts[0]) == [texts[0]]


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_chars is 0"):
        Registry(min_chars=0)


def greedy(text: str, bodies: set[str]) -> list[tuple[int, int]]:
    """The rule, in the plainest way: all places, longest first, then from the left."""
    places = [(len(b), i) for b in bodies for i in range(len(text)) if text.startswith(b, i)]
    taken: list[tuple[int, int]] = []
    for length, start in sorted(places, key=lambda p: (-p[0], p[1])):
        end = start + length
        inside = (start and text[start - 1].isalnum() and text[start].isalnum()) or (
            text[end : end + 1].isalnum() and text[end - 1].isalnum()
        )
        if not inside and all(end <= a or b <= start for a, b in taken):
            taken.append((start, end))
    return sorted(taken)


@settings(max_examples=300, deadline=None)
@given(
    bodies=st.lists(st.text("ab .é\n", min_size=1, max_size=7), max_size=8),
    text=st.text("ab .é\n", max_size=60),
    min_chars=st.integers(1, 4),
)
def test_equals_the_plain_rule_and_loses_nothing(bodies: list[str], text: str, min_chars: int) -> None:
    registry = Registry(min_chars=min_chars)
    registry.register(bodies)
    assert joined(registry.split(text)) == text
    kept = {b.strip() for b in bodies if len(b.strip()) >= min_chars}
    assert [(m.start, m.end) for m in registry.find(text)] == greedy(text, kept)


def passages(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 9))) for _ in range(2000)]
    return [" ".join(rng.choices(words, k=rng.randint(80, 200))) for _ in range(count)]


def test_ten_thousand_texts_in_a_long_prompt_are_found_quickly() -> None:
    texts = passages(10_000, 1)
    registry = Registry()
    assert registry.register(texts) == len(texts)
    prompt = "\n\n".join(f"[{n}] {text}" for n, text in enumerate(texts[:130]))
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        pieces = registry.split(prompt)
        seconds.append(time.perf_counter() - start)
    assert sum(isinstance(p, Segment) for p in pieces) == 130
    assert joined(pieces) == prompt
    # About 15 ms on an idle core; the bound leaves room for a busy one.
    assert min(seconds) < 0.25


def test_many_threads_at_once() -> None:
    texts = passages(400, 2)
    registry = Registry(max_bytes=200 * 1500)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(60):
                some = rng.sample(texts, 20)
                registry.register(some)
                prompt = "\n".join(some)
                assert joined(registry.split(prompt)) == prompt
                registry.forget(some[:3])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert registry.num_bytes <= registry.max_bytes
