"""Where segments are kept, as text: what is understood, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from hypic.config import EngineConfig
from hypic.errors import ConfigError
from hypic.store_spec import TierSpec, parse_store


def test_tiers_are_read_in_order() -> None:
    assert parse_store("device://8GiB,host://32GiB,disk:///path?size=200GiB") == (
        TierSpec("device", 8 * 2**30),
        TierSpec("host", 32 * 2**30),
        TierSpec("disk", 200 * 2**30, Path("/path")),
    )
    assert parse_store("disk:///a,b/c%20d?size=1KB") == (TierSpec("disk", 1000, Path("/a,b/c d")),)
    assert parse_store("disk:///x?size=65536")[0].budget_bytes == 2**16
    assert parse_store("device://0")[0].budget_bytes == 0, "nothing is kept that is not pinned"
    assert parse_store(" host://1 GiB , disk://~/cache?size=2GiB")[1].path == Path.home() / "cache"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "'' is no tier; known are 'device://8GiB'"),
        ("8GiB", "'8GiB' is no tier"),
        ("ssd:///x?size=1GiB", "'ssd:///x?size=1GiB' is no tier"),
        ("device://1GiB,", "'' is no tier"),
        ("device://1GiB;host://1GiB", "'1GiB;host://1GiB' is not a size"),
        ("host://1GiB,device://1GiB", "the fastest first: device, host, disk"),
        ("host://1GiB,host://2GiB", "name each tier once"),
        ("host://", "'host://' has no size; write it as in 'host://32GiB'"),
        ("host://lots", "'host://lots': 'lots' is not a size"),
        ("disk:///x", "'disk:///x' has no size; write it as in 'disk:///var/cache/hypic?size=200GiB'"),
        ("disk:///x?size=", "has no size"),
        ("disk:///x?sise=1GiB", "has the option 'sise'"),
        ("disk://x?size=1GiB", "has no absolute path"),
        (
            "disk:///x?size=1",
            "'disk:///x?size=1' has no unit, so it is a size in bytes, too small for any entry; write it as in 'disk:///",
        ),
        ("disk:///x?size=65535", "too small for any entry"),
        (
            "host://8",
            "'host://8' has no unit, so it is a size in bytes, too small for any entry; write it as in 'host://32GiB'",
        ),
        ("disk:///x?size=1GiB&size=2GiB", "has an option twice"),
        ("disk:///x?1GiB", "has the option '1GiB'; all there is is size="),
        ("host://1GiB?size=2GiB", "'1GiB?size=2GiB' is not a size"),
        ("disk://?size=1GiB", "has no absolute path"),
    ],
)
def test_what_cannot_be_a_store_is_refused_with_the_way_out(text: str, sentence: str) -> None:
    for refused in (parse_store, lambda text: EngineConfig(store=text)):
        with pytest.raises(ConfigError) as caught:
            refused(text)
        assert sentence in str(caught.value) and str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_the_device_is_a_cap_and_the_others_are_tiers() -> None:
    config = EngineConfig(store="device://2GiB,host://1GiB")
    assert config.store_bytes == 2**31 and [tier.scheme for tier in config.tiers] == ["host"]
    assert EngineConfig(store="host://1GiB").store_bytes is None and EngineConfig().tiers == ()
