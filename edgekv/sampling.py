"""From logits to one token: temperature, top-k, top-p, min-p, repetition penalty. Same seed, same tokens.

The order is that of transformers: penalty, temperature, top-k, top-p, min-p. Nucleus sampling (Holtzman et al., arXiv
1904.09751) needs the probabilities in order; sorting a whole vocabulary costs more than the rest of a step, so only the
most likely 512 are sorted when they already hold the nucleus, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgekv.about import about
from edgekv.errors import InvalidOption

Float32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

MAX_TOP_LOGPROBS = 20
"""As OpenAI's interface has it."""

_PARTIAL = 512
_COLDEST = 1e-5  # below it, two float32 logits that differ at all differ by more than the temperature


@dataclass(frozen=True)
class SamplingOptions:
    """How the next token is chosen, and when to stop.

    Raises:
        InvalidOption: a value is out of range.
    """

    temperature: float = about("Randomness; 0 takes the most likely token.", default=0.7)
    top_k: int = about("Only the k most likely tokens; 0 is all.", default=0)
    top_p: float = about("Only the most likely tokens that hold this share.", default=0.95)
    min_p: float = about("Only tokens this likely relative to the most likely.", default=0.0)
    repetition_penalty: float = about("Above 1 makes what the answer has said less likely.", default=1.0)
    penalty_window: int = about("How many of the answer's last tokens the penalty looks at.", default=256)
    seed: int | None = about("Same seed, same text. Default: different every time.")
    max_new_tokens: int | None = about(
        "Longest answer. Default: what the cache has room for or, where turns leave, as many tokens as it holds."
    )
    max_seconds: float | None = about("Longest time for an answer, reading the prompt included. Default: no limit.")
    stop: tuple[str, ...] = about("Text that ends the answer (may be given several times).", default=())
    json_schema: str | None = about("JSON schema that the answer must follow.")
    grammar: str | None = about("Grammar that the answer must follow, in llguidance's Lark.")
    top_logprobs: int | None = about("Report each token's log probability, and of this many alternatives.")

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.seed is not None and self.seed < 0:
            raise InvalidOption(f"seed is {self.seed}; it must not be negative.")
        if self.top_p == 0:
            raise InvalidOption("top_p is 0, which allows no token: use temperature 0 for the most likely one.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise InvalidOption(f"max_new_tokens is {self.max_new_tokens}; at least one token must be allowed.")
        if self.max_seconds is not None and not (isinstance(self.max_seconds, int | float) and self.max_seconds > 0):
            raise InvalidOption(f"max_seconds is {self.max_seconds!r}; it must be a number above 0.")
        self._check_texts()

    def _check_numbers(self) -> None:
        limits = {
            "temperature": (self.temperature, 0.0, 100.0),
            "top_k": (self.top_k, 0, 1 << 31),
            "top_p": (self.top_p, 0.0, 1.0),
            "min_p": (self.min_p, 0.0, 1.0),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100.0),
            "penalty_window": (self.penalty_window, 0, 1 << 31),
            "top_logprobs": (self.top_logprobs or 0, 0, MAX_TOP_LOGPROBS),
        }
        for name, (value, low, high) in limits.items():
            if not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidOption(f"{name} is {value}; it must be between {low} and {high}.")
        for name in ("top_k", "penalty_window", "seed", "max_new_tokens", "top_logprobs"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, int):
                raise InvalidOption(f"{name} is {value!r}; it must be a whole number.")

    def _check_texts(self) -> None:
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidOption("stop must be a sequence of strings, none of them empty.")
        for name, value in (("json_schema", self.json_schema), ("grammar", self.grammar)):
            if not isinstance(value, str | None):
                raise InvalidOption(f"{name} is a {type(value).__name__}; it must be a text.")
        if self.json_schema is not None and self.grammar is not None:
            raise InvalidOption("An answer can follow a JSON schema or a grammar, not both: give one of them.")


class Constraint(Protocol):
    """What an answer must follow (text/grammar.py makes them)."""

    def mask(self, logits: Float32) -> Float32:
        """A copy of the logits [V] with -inf at the tokens that may not come next."""

    def accept(self, token: int) -> None:
        """This token has been chosen."""


@dataclass(frozen=True)
class TokenScore:
    """A token's log probability in the model's own distribution, and those of the most likely tokens, in order."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def score_token(logits: Float32, token: int, top: int) -> TokenScore:
    """Log probabilities by the logits [V] as the model gave them: before penalty, temperature and any constraint."""
    shifted = logits.astype(np.float64) - logits.max()
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argpartition(-logs, min(top, len(logs) - 1))[:top]
    best = best[np.argsort(-logs[best], kind="stable")]
    return TokenScore(token, float(logs[token]), tuple((int(number), float(logs[number])) for number in best))


class Sampler:
    """Chooses tokens one after another with one random stream: the one given, or one that begins at the seed."""

    def __init__(
        self,
        options: SamplingOptions,
        constraint: Constraint | None = None,
        random: np.random.Generator | None = None,
    ) -> None:
        self._options, self._constraint = options, constraint
        self._random = np.random.default_rng(options.seed) if random is None else random

    def __call__(self, logits: Float32, recent: Sequence[int] = ()) -> int:
        """The next token.

        Args:
            logits: [V], not changed. recent: the answer so far, for the repetition penalty. The prompt is left out: its
                end-of-turn tokens would be penalised too, and answers would not end.
        """
        options = self._options
        if options.repetition_penalty != 1.0:
            seen = recent[max(0, len(recent) - options.penalty_window) :]
            logits = _penalise(logits, seen, options.repetition_penalty)
        if self._constraint is None:
            return self._choose(logits)
        token = self._choose(self._constraint.mask(logits))
        self._constraint.accept(token)
        return token

    def _choose(self, logits: Float32) -> int:
        options = self._options
        if options.temperature < _COLDEST:
            return int(np.argmax(logits))
        probabilities = softmax(logits / np.float32(options.temperature))
        tokens, weights = self._candidates(probabilities)
        point = self._random.random() * float(weights.sum(dtype=np.float64))
        chosen = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), point, side="right"))
        return int(tokens[min(chosen, len(tokens) - 1)])

    def _candidates(self, probabilities: Float32) -> tuple[Indices, Float32]:
        """Token ids and probabilities that are left after top-k, top-p and min-p, most likely first."""
        options = self._options
        tokens = _most_likely(probabilities, options.top_k, options.top_p)
        weights = probabilities[tokens]
        if options.top_p < 1:
            whole = weights.sum(dtype=np.float64) if options.top_k else 1.0
            inside = np.cumsum(weights, dtype=np.float64) - weights < options.top_p * whole
            inside[0] = True  # also of a top_p that vanishes in this product
            tokens, weights = tokens[inside], weights[inside]
        likely = weights >= options.min_p * weights[0]
        return tokens[likely], weights[likely]


def softmax(logits: Float32) -> Float32:
    """Probabilities along the last axis."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True), np.float32)


def _most_likely(probabilities: Float32, top_k: int, top_p: float) -> Indices:
    """Ids in falling order of probability: the top k, or enough of them to hold the nucleus."""
    size = len(probabilities)
    count = min(top_k or _PARTIAL, size)
    if count < size:
        least = np.partition(probabilities, size - count)[size - count]
        head = np.flatnonzero(probabilities >= least)  # with all that tie for the last place, in order of id
        if top_k or probabilities[head].sum(dtype=np.float64) >= top_p + 1e-6:
            ordered = head[np.argsort(-probabilities[head], kind="stable")]
            return ordered[:count] if top_k else ordered
    return np.argsort(-probabilities, kind="stable")


def _penalise(logits: Float32, recent: Sequence[int], penalty: float) -> Float32:
    """Keskar et al., CTRL (arXiv 1909.05858): divide positive logits of recent tokens, multiply negative ones."""
    logits = logits.copy()
    seen = np.unique(np.asarray(recent, np.intp))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    return logits
