"""The shared engine behind a model: started on first use, one share per model, given back by itself."""

import copy
import gc
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest

import hypic
from hypic.errors import UnsupportedModel
from hypic.integrations.langchain import ChatHypic, HypicLLM
from hypic.types import Prompt
from tests.integrations.scripted import ScriptedEngine


class Shared(types.ModuleType):
    """Stands in for ``hypic.shared``: one scripted engine per model and settings, with counted shares."""

    def __init__(self) -> None:
        super().__init__("hypic.shared")
        self.engines: dict[str, ScriptedEngine] = {}
        self.shares: dict[str, int] = {}

    def acquire(self, model: str | None, **settings: Any) -> ScriptedEngine:
        if model == "gpt2":
            raise UnsupportedModel("gpt2 has no linear attention; use a hybrid model.")
        key = f"{model}{sorted(settings.items())}"
        self.shares[key] = self.shares.get(key, 0) + 1
        return self.engines.setdefault(key, ScriptedEngine(model_name=model or "bundled"))

    def release(self, engine: ScriptedEngine) -> None:
        (key,) = [key for key, known in self.engines.items() if known is engine]
        self.shares[key] -= 1


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    module = Shared()
    monkeypatch.setitem(sys.modules, "hypic.shared", module)
    monkeypatch.setattr(hypic, "shared", module, raising=False)
    return module


@pytest.mark.parametrize("kind", [ChatHypic, HypicLLM])
def test_nothing_starts_before_the_first_use(kind: Any, shared: Shared) -> None:
    model = kind(model="m", settings={"device": "cpu"})
    assert not shared.engines
    model.invoke("When?")
    list(model.stream("When?"))
    model.invoke("When?", max_tokens=3)
    assert shared.shares == {"m[('device', 'cpu')]": 1}
    model.close()
    assert shared.shares == {"m[('device', 'cpu')]": 0}
    model.invoke("When?")
    assert shared.shares == {"m[('device', 'cpu')]": 1}


def test_shares_are_given_back_when_the_last_holder_goes(shared: Shared) -> None:
    one, other = ChatHypic(), HypicLLM()
    one.invoke("When?")
    other.invoke("When?")
    assert shared.shares == {"None[]": 2}
    again: Any = copy.deepcopy(one), copy.copy(one), one.model_copy()
    del one
    gc.collect()
    assert shared.shares == {"None[]": 2}
    again[0].invoke("When?")
    assert shared.shares == {"None[]": 2}
    del again, other
    gc.collect()
    assert shared.shares == {"None[]": 0}


def test_a_call_with_options_first_leaves_the_engine_with_the_model(shared: Shared) -> None:
    chat = ChatHypic()
    chat.invoke("When?", max_tokens=3)
    gc.collect()
    assert shared.shares == {"None[]": 1}
    stream = chat.stream("When?", max_tokens=3)
    next(stream)
    del chat
    gc.collect()
    assert shared.shares == {"None[]": 1}
    list(stream)
    del stream
    gc.collect()
    assert shared.shares == {"None[]": 0}


def test_another_model_for_one_call(shared: Shared) -> None:
    chat = ChatHypic(model="m")
    assert chat.invoke("When?").response_metadata["model_name"] == "m"
    assert chat.invoke("When?", model="n").response_metadata["model_name"] == "n"
    assert chat.bind(model="n").invoke("When?").response_metadata["model_name"] == "n"
    assert chat._get_ls_params(model="n")["ls_model_name"] == "n"
    assert shared.shares == {"m[]": 1, "n[]": 1}


def test_a_pickled_model_takes_a_share_of_its_own(shared: Shared) -> None:
    chat = ChatHypic(model="m")
    chat.invoke("When?")
    again = pickle.loads(pickle.dumps(chat))
    assert shared.shares == {"m[]": 1}
    again.invoke("When?")
    assert shared.shares == {"m[]": 2}


def test_a_model_that_cannot_be_loaded(shared: Shared) -> None:
    from langchain_core.exceptions import ModelNotFoundError

    with pytest.raises(ModelNotFoundError, match="gpt2 has no linear attention"):
        ChatHypic(model="gpt2").invoke("When?")


def test_the_base_model_flag_reaches_the_engine(shared: Shared) -> None:
    HypicLLM(template=False).invoke("Once")
    assert shared.engines["None[]"].last.prompt == Prompt(tail="Once", template=False)


def test_importing_loads_no_torch() -> None:
    code = "import hypic.integrations.langchain, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
