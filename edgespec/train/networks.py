"""Fitting a small network on soft labels, and the quality of its probabilities on unseen records.

Legend: n records, i inputs; labels are chances in [0, 1], weights say how much a record counts.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edgespec.grow.network import Activation, Network

NUM_BUCKETS = 10
NUM_CHECKS = 40  # looks at the validation records while fitting
SMALLEST = 1e-7  # no prediction is surer than that: its logarithm counts


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """The settings of a fit; the defaults are measured acceptance's."""

    hidden: tuple[int, ...] = (32,)  # widths of the hidden layers
    steps: int = 2000
    batch: int = 1024
    learning_rate: float = 0.01
    weight_decay: float = 1e-4
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """Records that a network is fitted to, or checked on."""

    features: Tensor  # [n, i]
    labels: Tensor  # [n]
    weights: Tensor  # [n]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationBucket:
    """Records whose predictions lie in one tenth of [0, 1]."""

    predicted: float  # weighted mean
    observed: float
    weight: float  # share of all


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """The quality of predictions on held-out records; losses in nats a record, weighted."""

    name: str
    num_train: int
    num_held_out: int
    log_loss: float
    baseline_log_loss: float  # of the prediction without the network
    least_log_loss: float  # the labels' own entropy: what perfect predictions would get
    calibration_error: float  # mean of |predicted - observed| over the buckets, by their weight
    reliability: tuple[CalibrationBucket, ...]


def held_out_mask(prompts: Tensor, share: float, *, seed: int) -> Tensor:
    """Mark, as bool [n], the records of about `share` of the prompts; of two prompts at least one is held out."""
    unique = prompts.unique()
    order = unique[torch.randperm(unique.shape[0], generator=torch.Generator().manual_seed(seed))]
    count = min(max(1, round(share * unique.shape[0])), unique.shape[0] - 1)
    return torch.isin(prompts, order[:count])


def fit_network(
    names: tuple[str, ...],
    sample: Sample,
    *,
    settings: FitSettings,
    validation: Sample | None = None,
    initial: Network | None = None,
) -> Network:
    """Fit a network with ReLU by weighted cross-entropy, with Adam at a rate that falls to 0 along a cosine.

    With `validation`, of other records, the result is the network that was best on them along the way: for nets that
    have more numbers than the records can tell. With `initial` the fit continues from a network, whose shape it has,
    and by whose means and deviations the inputs are standardised.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    features, labels = sample.features.float(), sample.labels.float()
    weights = (sample.weights / sample.weights.mean()).float()
    if initial is None:
        inputs, mean, std = standardised(features)
        layers = new_layers((features.shape[1], *settings.hidden, 1), generator)
    else:
        mean, std = initial.mean.float(), initial.std.float()
        inputs, layers = (features - mean) / std, layers_of(initial)
    batches = _batches(inputs.shape[0], min(settings.batch, inputs.shape[0]), generator)

    def loss_of_batch() -> Tensor:
        some = next(batches)
        logits = forward(layers, inputs[some], "relu")
        return nn.functional.binary_cross_entropy_with_logits(logits, labels[some], weight=weights[some])

    found, least_loss, check_every = (
        to_network(names, mean, std, "relu", layers),
        math.inf,
        settings.steps // NUM_CHECKS,
    )
    for step in descend(layers, loss_of_batch, settings):
        if validation is not None and (step % max(1, check_every) == 0 or step == settings.steps):
            with torch.no_grad():
                predicted = forward(layers, (validation.features.float() - mean) / std, "relu").sigmoid()
            loss = log_loss(predicted, validation.labels, validation.weights)
            if loss < least_loss:
                found, least_loss = to_network(names, mean, std, "relu", layers), loss
    return to_network(names, mean, std, "relu", layers) if validation is None else found


def descend(layers: Iterable[nn.Linear], loss_of: Callable[[], Tensor], settings: FitSettings) -> Iterator[int]:
    """Lower a loss with Adam, at a rate that falls to 0 along a cosine; yield the number of each finished step."""
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(1, settings.steps + 1):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        yield step


def _batches(count: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the records of each batch [batch]: every epoch has its own order, and leaves out what fills no batch."""
    while True:
        order = torch.randperm(count, generator=generator)
        for start in range(0, count - batch + 1, batch):
            yield order[start : start + batch]


def standardised(features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [..., i] of mean 0 and deviation 1, with the means and deviations [i] that they had."""
    std, mean = torch.std_mean(features.flatten(0, -2), 0, correction=0)
    std = torch.where(std > 1e-6, std, 1.0)  # an input that never varied says nothing
    return (features - mean) / std, mean, std


def new_layers(sizes: tuple[int, ...], generator: torch.Generator) -> list[nn.Linear]:
    """Return layers of these widths, from the inputs to the one output."""
    return [_layer(size, next_size, generator) for size, next_size in itertools.pairwise(sizes)]


def layers_of(network: Network) -> list[nn.Linear]:
    """Return a network's layers, to be fitted on; the network stays as it is."""
    found = []
    for weight, bias in zip(network.weights, network.biases, strict=True):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)
        found.append(layer)
    return found


def forward(layers: list[nn.Linear], features: Tensor, activation: Activation) -> Tensor:
    """Return logits [...] of features [..., i]."""
    for layer in layers[:-1]:
        features = torch.relu(layer(features)) if activation == "relu" else torch.tanh(layer(features))
    logits: Tensor = layers[-1](features)
    return logits[..., 0]


def to_network(
    names: tuple[str, ...], mean: Tensor, std: Tensor, activation: Activation, layers: list[nn.Linear]
) -> Network:
    """Return fitted layers, on inputs that were standardised so, as a network."""
    return Network(
        inputs=names,
        mean=mean.double(),
        std=std.double(),
        activation=activation,
        weights=tuple(layer.weight.detach().double() for layer in layers),  # copies: layers are in float32
        biases=tuple(layer.bias.detach().double() for layer in layers),
    )


def report_on(
    name: str, predicted: Tensor, baseline: Tensor, labels: Tensor, weights: Tensor, *, num_train: int
) -> FitReport:
    """Report how predictions [n] hold against labels [n]."""
    weights = weights.double() / weights.double().sum()
    labels = labels.double()
    buckets = []
    which = (predicted * NUM_BUCKETS).long().clamp(max=NUM_BUCKETS - 1)
    for index in range(NUM_BUCKETS):
        share = weights * (which == index)
        total = float(share.sum())
        if total > 0:
            mean_predicted = float((share * predicted.double()).sum()) / total
            buckets.append(
                CalibrationBucket(
                    predicted=mean_predicted, observed=float((share * labels).sum()) / total, weight=total
                )
            )
    return FitReport(
        name=name,
        num_train=num_train,
        num_held_out=labels.shape[0],
        log_loss=log_loss(predicted, labels, weights),
        baseline_log_loss=log_loss(baseline, labels, weights),
        least_log_loss=log_loss(labels, labels, weights),
        calibration_error=sum(bucket.weight * abs(bucket.predicted - bucket.observed) for bucket in buckets),
        reliability=tuple(buckets),
    )


def log_loss(predicted: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Return the weighted cross-entropy of labels [n] in [0, 1] under predictions [n], in nats."""
    predicted, labels, weights = predicted.double().clamp(SMALLEST, 1 - SMALLEST), labels.double(), weights.double()
    losses = -(labels * predicted.log() + (1 - labels) * (1 - predicted).log())
    return float((losses * weights).sum() / weights.sum())


def _layer(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(num_inputs, num_outputs)
    with torch.no_grad():
        layer.weight.normal_(0, num_inputs**-0.5, generator=generator)
        layer.bias.zero_()
    return layer
