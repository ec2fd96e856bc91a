"""Several linear maps of one input as one product: their weights lie one after the other in memory.

Each map keeps its own name and parameter, a view of the common weight, so that checkpoints and adapters see nothing of
it. Layers that were never joined, as in training, run their maps one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from hypic_kernels import matvec


def projected(x: Tensor, linear: nn.Linear) -> Tensor:
    """``linear(x)`` of ``[N, in]``: by a kernel of ours for few tokens, where that reads the weight faster."""
    if linear.bias is None and matvec.takes_product(x, linear.weight):
        return matvec.product(x, linear.weight)
    out: Tensor = linear(x)
    return out


class Joined:
    """The maps of one layer that see the same input, ``[N, in]``; without biases."""

    def __init__(self, *maps: nn.Linear) -> None:
        assert all(each.bias is None for each in maps), "only maps without biases are joined"
        self.maps = maps
        self._weight: Tensor | None = None
        self._sizes = tuple(each.out_features for each in maps)

    def join(self) -> None:
        """Lay the maps' weights into one, wherever they are; what they hold is lost, so before they are loaded."""
        first = self.maps[0].weight
        self._weight = first.new_empty((sum(self._sizes), first.shape[1]))
        for each, part in zip(self.maps, self._weight.split_with_sizes(self._sizes), strict=True):
            each.weight = nn.Parameter(part, requires_grad=False)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """``[N, out]`` of every map; views of one product if they are joined."""
        if self._weight is None:
            return [each(x) for each in self.maps]
        return F.linear(x, self._weight).split_with_sizes(self._sizes, dim=-1)


def join_all(model: nn.Module) -> None:
    """Join the maps of every layer of a model that has such; see ``Joined.join``."""
    for module in model.modules():
        for joined in [value for value in vars(module).values() if isinstance(value, Joined)]:
            joined.join()


def expose_all(model: nn.Module) -> None:
    """Let Python find the parts and weights of a model's layers as plain attributes, once they stay as they are.

    ``nn.Module`` keeps them in tables of its own and looks there when an attribute was not found, which takes ten times
    as long, dozens of times a layer. Assigning a weight or a part to such an attribute, as torch does it, takes it out
    again, and copies of the model have their own. Nothing else that changes the tables is seen: ``None`` assigned,
    ``register_parameter``, ``to_empty`` (call this again behind those), ``del``, and ``torch.func.functional_call``.
    """
    for module in model.modules():
        vars(module).update(module._parameters)
        vars(module).update(module._modules)
