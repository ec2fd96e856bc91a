"""Values of the public surface refuse what cannot be right, with the value and the way out in one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hypic
from hypic import CacheReport, Completion, EngineConfig, HypicError, Policy, Prompt, SamplingParams, Segment, Usage
from hypic.errors import CheckpointError, ConfigError, PromptError, UnsupportedModel
from hypic.store_spec import parse_bytes
from hypic.types import MOST_LOGPROBS, SegmentReport


def refusal(make: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(HypicError) as caught:
        make(*args, **kwargs)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number at least 1"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0.0 and at most 1.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, "top_k is 2.5; it must be a whole number"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be above 0.0"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1; it must be at least -2.0 and at most 2.0"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"logprobs": 101}, "logprobs is 101"),
        ({"seed": 2**63}, f"seed is {2**63}"),
        ({"stop": [""]}, "at least one character"),
        ({"stop": [7]}, "at least one character"),
        ({"stop": 7}, "stop is 7; pass a text, or a list of texts"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; pass a text"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; pass True or False"),
        ({"ignore_eos": None}, "ignore_eos is None"),
        ({"temperature": 1e300}, "temperature is 1e+300; it must be at least 0.0 and below 2**63"),
        ({"temperature": "1"}, "temperature is '1'; it must be a number at least 0.0"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"max_tokens": 2**63}, "and below 2**63"),
        ({"seed": -(2**63) - 1}, "seed is -9223372036854775809"),
    ],
)
def test_sampling_values_out_of_range(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(SamplingParams, **values)


def test_sampling_values_at_their_bounds() -> None:
    params = SamplingParams(1, 0, 1.0, 0, 1.0, 0.01, 2, -2, -(2**63), "stop", MOST_LOGPROBS)
    assert MOST_LOGPROBS == 100 and SamplingParams(temperature=9).temperature == 9, "as other open engines have it"
    assert params.stop == ("stop",) and params.top_k == 0
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().temperature is None
    lists: list[Any] = [deque("ab"), {"a": 1, "b": 2}.keys(), np.array(["a", "b"]), (letter for letter in "ab")]
    for stop in lists:
        assert SamplingParams(stop=stop).stop == ("a", "b"), "of any kind of list"


def test_numbers_of_numpy_become_pythons() -> None:
    values: tuple[Any, ...] = (np.int64(40), np.float32(0.5), np.bool_(True), np.array(7))
    whole, part, flag, seed = values
    found: list[tuple[Any, Any]] = [
        (SamplingParams(whole, part, top_k=whole, ignore_eos=flag), SamplingParams(40, 0.5, top_k=40, ignore_eos=True)),
        (Policy(seam=whole, seam_share=part, deterministic=flag), Policy(seam=40, seam_share=0.5, deterministic=True)),
        (Segment("x", ttl_s=whole, seam=whole, cache=flag), Segment("x", ttl_s=40, seam=40, cache=True)),
        (Prompt([], "x", template=flag), Prompt([], "x", template=True)),
        (EngineConfig(max_running=whole, memory=part, seed=seed, ttl=whole),
         EngineConfig(max_running=40, memory=0.5, seed=7, ttl=40)),
    ]  # fmt: skip
    for mine, theirs in found:
        assert mine == theirs and json.dumps(dataclasses.asdict(mine)) == json.dumps(dataclasses.asdict(theirs))
    wrong: dict[str, Any] = {
        "seam": np.float64(8),
        "tail_seam": np.int64(-1),
        "live_last": np.array([8]),
        "rotate": whole,
    }
    for name, value in wrong.items():
        assert f"{name} is " in refusal(Policy, **{name: value})


def test_types_and_devices_of_torch_and_a_path_are_taken_by_their_names() -> None:
    config = EngineConfig(device=torch.device("cuda", 1), dtype=torch.bfloat16, adapter=Path("lora"))  # type: ignore[arg-type]
    assert config == EngineConfig(device="cuda:1", dtype="bfloat16", adapter="lora")
    assert "dtype is 'int8'; choose one of" in refusal(EngineConfig, dtype=torch.int8)


@pytest.mark.parametrize(
    ("make", "args", "sentence"),
    [
        (Segment, {"text": b"x"}, "text is bytes, not str"),
        (Segment, {"text": "x", "kind": "page"}, "kind is 'page'; choose one of 'document', 'system'"),
        (Prompt, {"segments": "x"}, "must be a list of Segment"),
        (Prompt, {"segments": Segment("x")}, "must be a list of Segment"),
        (Prompt, {"segments": ["x"]}, "holds a str; wrap each text as Segment(text)"),
        (Prompt, {"tail": None}, "tail is NoneType, not str"),
        (Prompt, {"segments": None}, "segments is None; it must be a list of Segment"),
        (Prompt, {"segments": 5}, "segments is 5; it must be a list of Segment"),
        (Prompt, {"glue": None}, "glue is NoneType, not str"),
        (Prompt, {"template": "no"}, "template is 'no'; pass True or False"),
        (Segment, {"text": "x", "cache": "no"}, "cache is 'no'; pass True or False"),
        (Segment, {"text": "x", "cache": 1}, "cache is 1; pass True or False"),
    ],
)
def test_prompts_that_cannot_be_right(make: Any, args: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(make, **args)


def test_prompts_are_frozen_values() -> None:
    prompt = Prompt([Segment("a")], "q")
    assert prompt.segments == (Segment("a"),) and prompt == Prompt((Segment("a"),), "q")
    with pytest.raises(dataclasses.FrozenInstanceError):
        prompt.tail = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"reuse": "all"}, "reuse is 'all'; choose one of 'segments', 'prefix', 'none'"),
        ({"compose": "sum"}, "compose is 'sum'"),
        ({"seam": -1}, "seam is -1; it must be a whole number of tokens"),
        ({"seam": True}, "seam is True"),
        ({"min_segment_tokens": 1.0}, "min_segment_tokens is 1.0"),
        ({"rotate": None}, "rotate is None; pass True or False"),
        ({"rotate": 1}, "rotate is 1; pass True or False"),
        ({"deterministic": "no"}, "deterministic is 'no'; pass True or False"),
        ({"primed": 1}, "primed is 1; pass True or False"),
        ({"rungs": "yes"}, "rungs is 'yes'; pass True or False"),
    ],
)
def test_policies_that_cannot_be_right(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(Policy, **values)


def test_the_shortest_segment_follows_the_seam() -> None:
    assert [Policy().shortest, Policy(seam=4).shortest, Policy(min_segment_tokens=0).shortest] == [32, 16, 0]
    assert Policy().with_(seam=16) == Policy(seam=16)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of 'auto', 'float64'"),
        ({"load_format": "pickle"}, "load_format is 'pickle'"),
        ({"primer": b"text"}, "primer is b'text'; pass a text, '' for none, or None for the checkpoint's own"),
        ({"memory": 1.5}, "memory is 1.5; pass bytes as a whole number, a size such as '8GiB', or a share"),
        ({"memory": "1.5"}, "memory is '1.5'; pass bytes"),
        ({"memory": "0.0"}, "memory is '0.0'; pass bytes"),
        ({"memory": "50%"}, "memory is '50%'; pass bytes"),
        ({"memory": "lots"}, "memory is 'lots'; pass bytes"),
        ({"memory": None}, "memory is None; pass bytes"),
        ({"memory": True}, "memory is True; pass bytes"),
        ({"memory": -1}, "memory is -1; pass bytes"),
        ({"memory": float("nan")}, "memory is nan; pass bytes"),
        ({"memory": "8 Gb"}, "memory is '8 Gb'; pass bytes"),
        ({"store": "disk://1GiB"}, "'disk://1GiB' has no absolute path"),
        ({"store": "device://much"}, "'much' is not a size"),
        ({"max_running": 0}, "max_running is 0; it must be a whole number, 1 or more"),
        ({"page_size": 1.0}, "page_size is 1.0"),
        ({"policy": {"seam": 4}}, "pass hypic.Policy"),
        ({"device": 5}, "device is 5; choose 'auto', 'cpu' or 'cuda'"),
        ({"graphs": "no"}, "graphs is 'no'; pass True or False"),
        ({"seed": True}, "seed is True; pass a whole number"),
        ({"seed": 2**63}, "of at most 64 bits"),
        ({"ttl": []}, "ttl is []; pass seconds above 0"),
        ({"ttl": True}, "ttl is True; pass seconds above 0"),
    ],
)
def test_settings_that_cannot_be_right(values: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(EngineConfig, **values)


def test_unknown_settings_name_the_known_ones() -> None:
    message = refusal(EngineConfig.of, devise="cpu")
    assert "unknown setting 'devise' (did you mean 'device'?)" in message and "device" in message and "seam" in message


def test_what_is_no_policy_is_refused_beside_its_fields_too() -> None:
    assert "policy is 5; pass hypic.Policy" in refusal(EngineConfig.of, policy=5, seam=4)


def test_policy_fields_may_stand_among_settings() -> None:
    assert EngineConfig.of(seam=4, device="cpu") == EngineConfig(device="cpu", policy=Policy(seam=4))
    assert EngineConfig.of(policy=Policy(seam=4), reuse="none").policy == Policy(seam=4, reuse="none")
    assert EngineConfig.of() == EngineConfig()


def test_sizes() -> None:
    assert [parse_bytes(text) for text in (7, "7", "8GiB", "1.5 KiB", "500 MB")] == [7, 7, 2**33, 1536, 5 * 10**8]
    assert EngineConfig(store="device://2GiB").store_bytes == 2**31 and EngineConfig().store_bytes is None
    assert EngineConfig(memory=0.25).memory_bytes(1000) == 250
    assert EngineConfig(memory="1 KB").memory_bytes(5) == 1000
    assert [EngineConfig(memory=text).memory_bytes(1000) for text in ("0.5", " .25 ", "0.5 KB", "7")] == [
        500,
        250,
        500,
        7,
    ]


def test_pieces_of_an_answer_join() -> None:
    pieces = [
        Completion("Ad", (1,), reasoning="Hm"),
        Completion("a", (2, 3)),
        Completion("", (), finish_reason="stop", usage=Usage(5, 3, 4, 1), report=CacheReport(prompt_tokens=5)),
    ]
    whole = Completion.join(pieces)
    assert (whole.text, whole.token_ids, whole.reasoning, whole.finish_reason) == ("Ada", (1, 2, 3), "Hm", "stop")
    assert whole.usage is not None and whole.usage.total_tokens == 8
    assert whole.report is not None and whole.report.prompt_tokens == 5
    assert Completion.join([]) == Completion()


def test_reports_count_their_hits() -> None:
    segments = tuple(SegmentReport("document", None, None, outcome, 9) for outcome in ("hit", "encoded", "live", "hit"))
    assert CacheReport(segments).num_hits == 2


def test_the_error_tree() -> None:
    assert issubclass(CheckpointError, UnsupportedModel) and not issubclass(UnsupportedModel, ValueError)
    for error in (ConfigError, PromptError):
        assert issubclass(error, HypicError) and issubclass(error, ValueError)


def test_public_names_exist() -> None:
    assert all(hasattr(hypic, name) for name in hypic.__all__)


@pytest.mark.parametrize("name", ["seam", "tail_seam", "seam_every", "live_last"])
def test_a_count_of_a_policy_is_never_none(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is None; it must be a whole number"):
        Policy(**{name: None})
    assert Policy(min_segment_tokens=None).shortest == 32


def test_more_threads_or_processes_than_a_host_can_start_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads is 1000000; pass at most 1024"):
        EngineConfig(threads=10**6)
    with pytest.raises(ConfigError, match="workers is 100000, each a process"):
        EngineConfig(workers=10**5)
    assert EngineConfig(workers=64, threads=1024).workers == 64
    assert EngineConfig(workers=1000, launcher="ray").workers == 1000
