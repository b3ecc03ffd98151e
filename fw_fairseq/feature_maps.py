"""Feature maps phi: queries and keys pass through one before they meet the memory. (..., head_dim) -> (..., out_dim).

Each is an ``nn.Module`` built as ``FEATURE_MAPS[name](head_dim, **options)``; a new one is one class and one entry here. Its class
says which settings it is built from. Exponentials and random projections are computed in fp32 whatever the input's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .autograd import unit, without_autocast
from .errors import Mistake


class FeatureMap(nn.Module):
    """A feature map.

    out_dim: the width of phi(x).
    options: the settings that belong to the map, by name, and the arguments of the constructor that they are.
    non_negative: whether no feature is below 0, so that sum and attention normalisation may be used.
    at_most_one: whether no phi(x) is longer than 1, so that a rule with an erase needs no normalisation.
    row_map: the name in ``ROW_MAPS`` of the function from ``linear(x)`` to phi(x), where that has no parameters; kernels can
        then compute it. None: the map always runs in PyTorch.
    """

    equation = ""
    eps = 1e-6  # added to the divisor of attention normalisation; far below any phi(q) . phi(k) that matters
    options: ClassVar[dict[str, str]] = {}
    non_negative = at_most_one = False
    row_map: str | None = None

    def __init__(self, head_dim: int, out_dim: int) -> None:
        super().__init__()
        self.head_dim, self.out_dim = positive("head_dim", head_dim), positive("out_dim", out_dim)

    @classmethod
    def of_settings(cls, head_dim: int, heads: int, settings: Any) -> FeatureMap:
        """The map of a layer with so many heads, from the settings that belong to it."""
        return cls(head_dim, **{argument: getattr(settings, name) for name, argument in cls.options.items()})

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Features and None, or features of at most 1 and the log (...,) of the factor that was divided out of them.

        The factor cancels in sum normalisation. In attention normalisation that of queries cancels, and that of keys is passed to
        ``fast_weight`` as ``key_log_scale``."""
        return self(x), None

    def linear(self, x: Tensor) -> Tensor:
        """The part of the map that has parameters, before the part that ``row_map`` names."""
        return x

    def redraw(self, keep: bool = False) -> None:
        """Draws new random projections, once per training mini-batch; with ``keep`` the map uses those of evaluation instead."""

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, out_dim={self.out_dim}"


class Elementwise(FeatureMap):
    """A map of each number by itself."""

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)


class Identity(Elementwise):
    """The rows as they are."""

    equation = "x"
    row_map = "identity"

    def forward(self, x: Tensor) -> Tensor:
        return x


class Elu(Elementwise):
    """Positive features."""

    equation = "elu(x) + 1"
    non_negative = True
    row_map = "elu"

    def forward(self, x: Tensor) -> Tensor:
        return elu(x)


class Tanh(Elementwise):
    """Features between -1 and 1."""

    equation = "tanh(x)"

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Silu(Elementwise):
    """The rows after SiLU, as HGRN 2 has its queries."""

    equation = "x sigmoid(x)"

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x)


class LearnedRelu(FeatureMap):
    """One learned map for queries and keys; with ``heads``, one for each head of (..., H, T, head_dim)."""

    equation = "relu(W x + b), W and b learned per head"
    non_negative = True
    row_map = "relu"

    def __init__(self, head_dim: int, out_dim: int | None = None, heads: int | None = None) -> None:
        super().__init__(head_dim, head_dim if out_dim is None else out_dim)
        apart = () if heads is None else (positive("heads", heads),)
        self.weight = nn.Parameter(torch.empty(*apart, self.head_dim, self.out_dim))
        self.bias = nn.Parameter(torch.zeros(*apart, *(1 for _ in apart), self.out_dim))
        for head in self.weight.view(-1, self.head_dim, self.out_dim):
            nn.init.xavier_uniform_(head)

    @classmethod
    def of_settings(cls, head_dim: int, heads: int, settings: Any) -> FeatureMap:
        return cls(head_dim, heads=heads)

    def linear(self, x: Tensor) -> Tensor:
        check_not_offloaded(self.weight, x, "feature_map is", "its layer reads its weight", "the layers")
        return x @ self.weight.to(x.dtype) + self.bias.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Dpfp(FeatureMap):
    """The deterministic parameter-free projection: x' times its own rolls, so that few features are active at once."""

    equation = "x' = [relu(x), relu(-x)]; cat over j = 1..nu of x' * roll(x', j)"
    options: ClassVar[dict[str, str]] = {"dpfp_nu": "nu"}
    non_negative = True
    row_map = "dpfp"

    def __init__(self, head_dim: int, nu: int = 1) -> None:
        if positive("nu", nu) >= 2 * positive("head_dim", head_dim):
            raise Mistake(f"--dpfp-nu is {nu}; with keys of width {head_dim} per head it must be at most {2 * head_dim - 1}")
        super().__init__(head_dim, 2 * nu * head_dim)
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        return dpfp(x, self.nu)


class RandomFeatures(FeatureMap):
    """A map of ``features`` random projections. Training draws new ones for each mini-batch; those of evaluation are drawn once and
    saved in the checkpoint."""

    options: ClassVar[dict[str, str]] = {"favor_features": "features"}

    def __init__(self, head_dim: int, features: int | None, orthogonal: bool) -> None:
        features = positive("features", features or positive("head_dim", head_dim))
        super().__init__(head_dim, 2 * features)
        self.features, self.orthogonal = features, orthogonal
        self.projection: Tensor
        self.drawn: Tensor | None
        self.register_buffer("projection", draw_projection(features, head_dim, orthogonal))
        self.register_buffer("drawn", None, persistent=False)

    def redraw(self, keep: bool = False) -> None:
        if keep:
            self.drawn = None
        elif self.training:
            self.drawn = draw_projection(self.features, self.head_dim, self.orthogonal, self.projection.device)

    def project(self, x: Tensor) -> Tensor:
        """R x (..., features) in fp32 at least."""
        rows = self.drawn if self.training and self.drawn is not None else self.projection
        with without_autocast(x.device.type):
            return x @ rows.to(x.dtype).mT


class Favor(RandomFeatures):
    """FAVOR+: positive random features whose products estimate exp(q . k), or with ``prescale``, which multiplies x by
    head_dim^-1/4, exp(q . k / sqrt(head_dim))."""

    equation = "exp(-|x|^2/2) / sqrt(2m) [exp(R x), exp(-R x)]"
    options: ClassVar[dict[str, str]] = {"favor_features": "features", "favor_prescale": "prescale"}
    eps = 1e-30  # kept at most 1 or summing to 1, its features have products of any size
    non_negative = True

    def __init__(self, head_dim: int, features: int | None = None, orthogonal: bool = True, prescale: bool = False) -> None:
        super().__init__(head_dim, features, orthogonal)
        self.prescale = prescale

    def exponents(self, x: Tensor) -> Tensor:
        x = wide(x) * (self.head_dim**-0.25 if self.prescale else 1.0)
        projected = self.project(x)
        return torch.cat([projected, -projected], dim=-1) - 0.5 * (x.square().sum(-1, keepdim=True) + math.log(self.out_dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.exponents(x).exp().to(x.dtype)

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        exponents = self.exponents(x)
        top = exponents.amax(-1, keepdim=True)
        return (exponents - top).exp().to(x.dtype), top.squeeze(-1)


class FavorRelu(RandomFeatures):
    """FAVOR+ with ReLU in place of the exponential: m features, whose products are those of a kernel of its own."""

    equation = "relu(R x) / sqrt(m)"
    non_negative = True

    def __init__(self, head_dim: int, features: int | None = None, orthogonal: bool = True) -> None:
        super().__init__(head_dim, features, orthogonal)
        self.out_dim = self.features

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(self.project(wide(x))) / math.sqrt(self.features)).to(x.dtype)


class Rfa(RandomFeatures):
    """Random Fourier features of x / |x|, whose coordinates are multiplied by a learned scale."""

    equation = "[sin(R (s * x/|x|)), cos(R (s * x/|x|))] / sqrt(m), s learned"
    at_most_one = True

    def __init__(self, head_dim: int, features: int | None = None, orthogonal: bool = True) -> None:
        super().__init__(head_dim, features, orthogonal)
        self.scale = nn.Parameter(torch.ones(head_dim))

    def forward(self, x: Tensor) -> Tensor:
        direction = unit(wide(x))
        projected = self.project(direction * self.scale.to(direction.dtype))
        return (torch.cat([projected.sin(), projected.cos()], dim=-1) / math.sqrt(self.features)).to(x.dtype)


FEATURE_MAPS: dict[str, type[FeatureMap]] = {
    "identity": Identity,
    "elu": Elu,
    "relu": LearnedRelu,
    "dpfp": Dpfp,
    "favor": Favor,
    "favor_relu": FavorRelu,
    "rfa": Rfa,
    "tanh": Tanh,
    "silu": Silu,
}


def elu(x: Tensor) -> Tensor:
    """The map of ``Elu``."""
    return F.elu(x) + 1


def dpfp(x: Tensor, nu: int) -> Tensor:
    """The map of ``Dpfp``."""
    x = torch.cat([torch.relu(x), torch.relu(-x)], dim=-1)
    return torch.cat([x * x.roll(j, dims=-1) for j in range(1, nu + 1)], dim=-1)


SMALLEST_SUM = 1e-6


def sum_normalise(features: Tensor, eps: float = SMALLEST_SUM) -> Tensor:
    """Non-negative features divided by their sum. A sum below eps counts as eps: zeros stay zeros, with a finite gradient."""
    wide_features = wide(features)
    total = wide_features.sum(-1, keepdim=True)
    return (wide_features / total.clamp(min=eps).masked_fill(total == 0, 1)).to(features.dtype)  # fp16 does not hold 1 / eps


def l2_normalise(features: Tensor) -> Tensor:
    """Features divided by their length."""
    return unit(wide(features)).to(features.dtype)


def l2_eps_normalise(features: Tensor, eps: float = 1e-6) -> Tensor:
    """Features divided by the root of their square and eps, as flash-linear-attention and transformers do it."""
    x = wide(features)
    return (x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()).to(features.dtype)


class Numbered(NamedTuple):
    """A function, and the number that it has in ``cuda/row_map.cuh`` and ``ops/native/decode.cpp``; None where they lack it."""

    number: int | None
    function: Callable[..., Tensor]


NORMS: dict[str, Numbered] = {
    "none": Numbered(0, lambda features: features),
    "sum": Numbered(1, sum_normalise),
    "l2": Numbered(2, l2_normalise),
    "l2_eps": Numbered(3, l2_eps_normalise),
}


def normalised(phi: Callable[[Tensor], Tensor], norm: str, x: Tensor) -> Tensor:
    """phi(x) after a norm, a name in ``NORMS``. fp16 does not hold the gradient of small features, so that it gets both in fp32."""
    if norm == "none":
        return phi(x)
    return NORMS[norm].function(phi(wide(x) if x.dtype == torch.float16 else x)).to(x.dtype)


def draw_projection(rows: int, width: int, orthogonal: bool = True, device: torch.device | None = None) -> Tensor:
    """(rows, width) fp32, each row distributed as N(0, I); orthogonal: in blocks of ``width`` rows that are exactly orthogonal."""
    gaussian = torch.randn(rows, width, device=device)
    if not orthogonal:
        return gaussian
    blocks = torch.linalg.qr(torch.randn(-(-rows // width), width, width, device=device))[0]
    signs = torch.randn(len(blocks), 1, width, device=device).sign()  # QR fixes signs; these make the direction uniform
    directions = (blocks * signs).mT.reshape(-1, width)[:rows]
    return directions * gaussian.norm(dim=-1, keepdim=True)


def wide(x: Tensor) -> Tensor:
    """x in fp32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def check_not_offloaded(weight: Tensor, x: Tensor, what: str, why: str, where: str) -> None:
    """Refuses a weight that accelerate has offloaded and does not load here: its placeholder has whatever is in memory."""
    if weight.is_meta and not x.is_meta:
        raise Mistake(f"{what} offloaded, and {why}; name a device for {where} in device_map")


def positive(name: str, value: int) -> int:
    """The value, if it is a whole number above 0."""
    if not isinstance(value, int) or value < 1:
        raise Mistake(f"{name} is {value!r}; it must be an integer of at least 1")
    return value


ROW_MAPS: dict[str, Numbered] = {
    "identity": Numbered(1, lambda x, nu: x),
    "elu": Numbered(2, lambda x, nu: elu(x)),
    "relu": Numbered(3, lambda x, nu: torch.relu(x)),
    "dpfp": Numbered(4, dpfp),
}


class RowMap(NamedTuple):
    """A map without parameters by name, and its norm: what a kernel can apply to the rows of q and k as it loads them. Calling it
    on rows (...,D) computes the features (...,K) in PyTorch, which is the definition."""

    name: str = "identity"  # in ROW_MAPS
    nu: int = 1  # of dpfp
    norm: str = "none"  # in NORMS

    def width(self, d: int) -> int:
        """K, the number of features of rows that are d wide."""
        return 2 * self.nu * d if self.name == "dpfp" else d

    def __call__(self, x: Tensor) -> Tensor:
        return normalised(lambda x: ROW_MAPS[self.name].function(x, self.nu), self.norm, x)


AS_IS = RowMap()  # q and k are features already
