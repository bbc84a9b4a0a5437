"""Greedy tokens of two engines: are they the same, and if not, is that rounding?

Attention that adds in another order gives other last bits, and greedy decoding turns on them wherever two
tokens are nearly as good. So an engine's tokens are kept with their logprobs and with how far each was ahead
of the next best. Two engines may part where that is little; until then their logprobs must be near each
other, and they must have agreed for a while (:func:`difference`). And what an engine said can be given to it
again as a prompt: prefill is other kernels, so a token that decoding found best must be the best there, or
nearly (:func:`consistency`). A page left out breaks all of that (``random_weights.PEAKED``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of a generation: ``ids``, ``logprobs`` and ``gaps``, each a list per request with one entry per token.
#: A gap is by how much (nats) a token was ahead of the next best one; None for a token that was not the best
#: (vLLM's synthetic acceptance takes drafts unseen).
Said = Mapping[str, Sequence[Sequence[Any]]]

# Limits in nats, for logits up to 8 in bf16, whose steps are 1/32 there (random_weights.py). Seen on an H200
# with them: right engines 0.005 to 0.014 apart on average and 0.065 at most in 200,000 tokens, parting at
# gaps up to 0.094; one token left out of attention 0.017 to 0.039 and 0.12 to 0.19; a page of 16 left out
# 0.05 to 0.09 and up to 0.6.
#: By how much rounding may turn a choice.
NEAR = 0.1
#: Between logprobs of the same tokens, on average over at least :data:`ENOUGH` of them, and for any token.
DRIFT = 0.016
FARTHEST = 0.1
ENOUGH = 32
#: All of these times as much for a trained model, whose logits of 16 to 32 have steps of 1/8.
TRAINED = 4.0
#: Tokens that requests agree on before they part, on average over a batch of at least :data:`BATCH`.
AGREED = 8
BATCH = 4
#: Share of the tokens that prefill may find worse than its best by more than :data:`NEAR`.
TURNED = 0.01


def _together(apart: Sequence[float], scale: float) -> bool:
    """Whether logprobs are as near each other as rounding leaves them."""
    drifted = len(apart) >= ENOUGH and sum(apart) / len(apart) > DRIFT * scale
    return not drifted and max(apart, default=0.0) <= FARTHEST * scale


def said(outputs: Sequence[Any]) -> dict[str, list[list[Any]]]:
    """Of vLLM's ``CompletionOutput`` objects of a greedy generation with ``logprobs=2``."""
    result: dict[str, list[list[Any]]] = {"ids": [], "logprobs": [], "gaps": []}
    for output in outputs:
        ids, logprobs, gaps = list(output.token_ids), [], []
        for token, at in zip(ids, output.logprobs, strict=True):
            own = at[token].logprob
            next_best = max((p.logprob for other, p in at.items() if other != token), default=own)
            logprobs.append(round(own, 5))
            gaps.append(round(own - next_best, 4) if own >= next_best else None)
        for name, row in (("ids", ids), ("logprobs", logprobs), ("gaps", gaps)):
            result[name].append(row)
    return result


@dataclass(frozen=True)
class Difference:
    """Between two generations of ``requests`` requests, of which ``parted`` do not say the same.

    ``verdict``: ``equal``, ``rounding`` or ``differ``. ``first``: the earliest token at which one parts.
    ``agreed``: tokens until then, averaged over all requests. ``widest``: the largest gap at which one
    parted, None if none is known. ``drift``, ``farthest``: mean and largest difference of the logprobs of
    what they both say, in nats. ``lengths``: requests that end where the other goes on.
    """

    requests: int
    parted: int
    first: int | None
    agreed: float
    widest: float | None
    drift: float
    farthest: float
    lengths: int
    verdict: str

    def __str__(self) -> str:
        drift = f"logprobs {self.drift:.4f} apart, at most {self.farthest:.3f}"
        if not self.parted:
            return "equal" if self.verdict == "equal" else f"equal, but {drift}"
        parted = f"{self.parted}/{self.requests}"
        if self.verdict == "rounding":
            widest = "" if self.widest is None else f" (gap {self.widest:.3f})"
            return f"{parted} part by rounding{widest} after {self.agreed:.0f}; {drift}"
        return f"{parted} differ from token {self.first}; {drift}"


def difference(a: Said, b: Said, scale: float = 1.0) -> Difference:
    """Of what two engines said to the same prompts; ``scale``: of the limits, 1 or :data:`TRAINED`."""
    agreed, gaps, apart = [], [], []
    parted = lengths = 0
    first: int | None = None
    for row, (ours, theirs) in enumerate(zip(a["ids"], b["ids"], strict=True)):
        shared = min(len(ours), len(theirs))
        at = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
        agreed.append(at)
        apart += [abs(p - q) for p, q in zip(a["logprobs"][row][:at], b["logprobs"][row][:at], strict=True)]
        if list(ours) != list(theirs):
            parted += 1
            first = at if first is None else min(first, at)
            if at == shared:
                lengths += 1
            elif a["gaps"][row][at] is not None:
                gaps.append(a["gaps"][row][at])
    requests, longest = len(agreed), max((len(ours) for ours in a["ids"]), default=0)
    mean = sum(agreed) / max(1, requests)
    # One request may meet two equal tokens at once; many do not. The first token is the prefill's.
    wanted = min(AGREED, longest / 2) if requests >= BATCH else min(1, longest / 2)
    near = max(gaps, default=0.0) <= NEAR * scale and mean >= wanted
    verdict = "equal" if not parted else "rounding" if near else "differ"
    return Difference(
        requests=requests,
        parted=parted,
        first=first,
        agreed=mean,
        widest=max(gaps, default=None),
        drift=sum(apart) / max(1, len(apart)),
        farthest=max(apart, default=0.0),
        lengths=lengths,
        verdict="differ" if lengths or not _together(apart, scale) else verdict,
    )


@dataclass(frozen=True)
class Consistency:
    """Of ``tokens`` said while decoding with what prefill makes of the same text.

    ``verdict``: ``consistent`` or ``differ``. ``drift``, ``farthest``: mean and largest difference of their
    logprobs, in nats. ``turned``: tokens that
    decoding found best and prefill worse than its best by more than :data:`NEAR`; ``widest``: the most.
    """

    tokens: int
    turned: int
    widest: float
    drift: float
    farthest: float
    verdict: str

    def __str__(self) -> str:
        verdict = "agrees with" if self.verdict == "consistent" else "DIFFERS from"
        return (
            f"decoding {verdict} prefill on {self.tokens} tokens: logprobs {self.drift:.4f} apart, at most "
            f"{self.farthest:.3f}; {self.turned} turned (at most {self.widest:.3f})"
        )


def consistency(said: Said, outputs: Sequence[Any]) -> Consistency:
    """``outputs``: vLLM's ``RequestOutput`` objects of each prompt followed by its tokens in ``said``, with
    ``prompt_logprobs=1``."""
    apart, behind = [], []
    rows = zip(said["ids"], said["logprobs"], said["gaps"], outputs, strict=True)
    for ids, logprobs, gaps, output in rows:
        scored = output.prompt_logprobs[-len(ids) :] if ids else []
        for token, logprob, gap, at in zip(ids, logprobs, gaps, scored, strict=True):
            own = at[token].logprob
            apart.append(abs(own - logprob))
            if gap is not None:
                behind.append(max(p.logprob for p in at.values()) - own)
    turned = sum(gap > NEAR for gap in behind)
    right = _together(apart, 1.0) and turned <= TURNED * len(apart)
    return Consistency(
        tokens=len(apart),
        turned=turned,
        widest=max(behind, default=0.0),
        drift=sum(apart) / max(1, len(apart)),
        farthest=max(apart, default=0.0),
        verdict="consistent" if right else "differ",
    )
