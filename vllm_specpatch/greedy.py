"""Greedy tokens of two engines: are they the same, and if not, is that rounding?

Attention that adds in another order gives other last bits, and greedy decoding turns on them wherever two
tokens are nearly as good. So an engine's tokens are kept with their logprobs and with what was nearly as
good. Two engines may part where each finds the other's token nearly as good; until then their logprobs must
be near each other, and they must have agreed for a while (:func:`difference`). And what an engine said can be
given to it again as a prompt: prefill is other kernels, so a token that decoding found best must be the best
there, or nearly (:func:`consistency`). At 1024 tokens one token left out of attention breaks that; the longer
the context, the less a token or a page of it weighs, and what a comparison can see is coarser
(``random_weights.PEAKED``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Of a generation: ``ids``, ``logprobs``, ``gaps`` and ``close``, each a list per request with one entry per
#: token, and ``synthetic``. A gap is by how much (nats) a token was ahead of the best other one, below 0 if
#: it was not the best itself; ``close`` are the other tokens within :data:`CLOSE` of the best one.
Said = Mapping[str, Any]

# Limits in nats, for logits up to 8 in bf16, whose steps are 1/32 there (random_weights.py); in the middle
# between two steps. Seen on an H200 with them: right engines 0.005 to 0.014 apart on average and 0.065 at
# most in 200,000 tokens, parting at gaps up to 0.094; one token left out of 1024 0.017 to 0.039 and 0.12 to
# 0.19; a page of 16 0.05 to 0.09 and up to 0.6.
#: By how much rounding may turn a choice.
NEAR = 0.11
#: Between logprobs of the same tokens: on average over at least :data:`ENOUGH` of them, over those of one
#: request, and for any token.
DRIFT = 0.016
DRIFT_OF_ONE = 0.025
FARTHEST = 0.11
ENOUGH = 32
#: These limits times as much with an fp8 cache, whose values rounding moves further.
FP8 = 1.75
#: And for a trained model, whose logits of 16 to 32 have steps of 1/8; single ones may jump further (experts
#: that are routed otherwise), so :data:`FARTHEST` is not judged there.
TRAINED = 4.0
CLOSE = NEAR * TRAINED
#: Tokens that requests agree on before they part, on average, by the number of requests: one may meet two
#: equal tokens at once, many do not. The first token is the prefill's.
AGREED = {8: 8, 4: 4, 1: 1}
#: To ask vLLM for, of each token, so that what was nearly as good is known.
LOGPROBS = 5
#: Share of the tokens that prefill may find worse than its best by more than :data:`NEAR`.
TURNED = 0.01


def said(outputs: Sequence[Any], synthetic: bool = False) -> dict[str, Any]:
    """Of vLLM's ``CompletionOutput`` objects of a greedy generation with :data:`LOGPROBS`. ``synthetic``:
    vLLM's synthetic acceptance was on, which takes drafts unseen, so that a token need not be the best
    one."""
    result: dict[str, Any] = {"ids": [], "logprobs": [], "gaps": [], "close": [], "synthetic": synthetic}
    for output in outputs:
        ids, rows = list(output.token_ids), []
        for token, at in zip(ids, output.logprobs, strict=True):
            own = at[token].logprob
            others = {other: p.logprob for other, p in at.items() if other != token}
            best = max(others.values(), default=own)
            near = [other for other, p in others.items() if p >= max(own, best) - CLOSE]
            rows.append((round(own, 5), round(own - best, 4), near))
        result["ids"].append(ids)
        for name, values in zip(("logprobs", "gaps", "close"), zip(*rows) if rows else ((), (), ())):
            result[name].append(list(values))
    return result


def scale_of_cache(dtype: str) -> float:
    """How many times as wide the limits are for a KV cache of ``dtype``, by vLLM's or torch's name."""
    return FP8 if dtype.startswith(("fp8", "float8")) else 1.0


def parting(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first token at which two requests differ, or at which one ends; None if they are the same."""
    shared = min(len(ours), len(theirs))
    at = next((i for i in range(shared) if ours[i] != theirs[i]), shared)
    return None if at == len(ours) == len(theirs) else at


def _trouble(apart: Sequence[Sequence[float]], scale: float) -> str | None:
    """Why logprobs are farther from each other than rounding leaves them; a list per request."""
    every = [d for row in apart for d in row]
    # Comparisons with NaN are False: asked the other way, it would pass.
    if not all(math.isfinite(d) for d in every):
        return "logprobs that are no numbers"
    if len(every) >= ENOUGH and not sum(every) / len(every) <= DRIFT * scale:
        return f"logprobs above {DRIFT * scale:.3f} apart on average"
    if any(len(row) >= ENOUGH and not sum(row) / len(row) <= DRIFT_OF_ONE * scale for row in apart):
        return f"a request whose logprobs are above {DRIFT_OF_ONE * scale:.3f} apart on average"
    if scale < TRAINED and not max(every, default=0.0) <= FARTHEST * scale:
        return f"a logprob above {FARTHEST * scale:.2f} apart"
    return None


@dataclass(frozen=True)
class Difference:
    """Between two generations of ``requests`` requests, of which ``parted`` do not say the same.

    ``verdict``: ``equal``, ``rounding`` or ``differ``, the last for ``reason``. ``first``: the earliest token
    at which one parts. ``agreed``: tokens until then, averaged over all requests. ``unseen``: partings at a
    draft that was accepted unseen, where nobody knows how sure its drafter was. ``widest``: the largest gap
    at the other partings, None if there are none. ``drift``, ``farthest``: mean and largest difference of the
    logprobs of what they both say, in nats.
    """

    requests: int
    parted: int
    first: int | None
    agreed: float
    unseen: int
    widest: float | None
    drift: float
    farthest: float
    verdict: str
    reason: str | None

    def __str__(self) -> str:
        drift = f"logprobs {self.drift:.4f} apart, at most {self.farthest:.3f}"
        why = f" ({self.reason})" if self.reason else ""
        if not self.parted:
            return f"equal, but {drift}{why}" if self.reason else "equal"
        if self.reason:
            return f"{self.parted}/{self.requests} differ from token {self.first}{why}; {drift}"
        widest = "" if self.widest is None else f" (gap {self.widest:.3f})"
        return f"{self.parted}/{self.requests} part by rounding{widest} after {self.agreed:.0f}; {drift}"


def difference(a: Said, b: Said, scale: float = 1.0) -> Difference:
    """Of what two engines said to the same prompts; ``scale``: of the limits in nats, 1, :data:`FP8` or
    :data:`TRAINED`."""
    agreed, gaps, apart = [], [], []
    parted = unseen = 0
    reason = first = None
    for row, (ours, theirs) in enumerate(zip(a["ids"], b["ids"], strict=True)):
        at = parting(ours, theirs)
        agreed.append(len(ours) if at is None else at)
        apart.append(
            [abs(p - q) for p, q in zip(a["logprobs"][row][:at], b["logprobs"][row][:at], strict=True)]
        )
        if at is None:
            continue
        parted += 1
        first = at if first is None else min(first, at)
        if at == min(len(ours), len(theirs)):
            reason = reason or "one ends where the other goes on"
        elif any(said["synthetic"] and said["gaps"][row][at] < 0 for said in (a, b)):
            unseen += 1
        else:
            gaps.append(max(said["gaps"][row][at] for said in (a, b)))
            reason = reason or _not_near(a, b, row, at, scale)
    mean = sum(agreed) / max(1, len(agreed))
    wanted = next((tokens for requests, tokens in AGREED.items() if len(agreed) >= requests), 0)
    longest = max((len(ours) for ours in a["ids"]), default=0)
    if parted and mean < min(wanted, longest / 2):
        reason = reason or f"they agreed on {mean:.1f} tokens only"
    reason = _trouble(apart, scale) or reason
    if not all(math.isfinite(p) for said in (a, b) for row in said["logprobs"] for p in row):
        reason = "logprobs that are no numbers"
    if not all(math.isfinite(p) for said in (a, b) for row in said["logprobs"] for p in row):
        reason = "logprobs that are no numbers"
    every = [d for row in apart for d in row]
    return Difference(
        requests=len(agreed),
        parted=parted,
        first=first,
        agreed=mean,
        unseen=unseen,
        widest=max(gaps, default=None),
        drift=sum(every) / max(1, len(every)),
        farthest=max(every, default=0.0),
        verdict="differ" if reason else "rounding" if parted else "equal",
        reason=reason,
    )


def _not_near(a: Said, b: Said, row: int, at: int, scale: float) -> str | None:
    """Why rounding cannot have turned this choice: neither may have been sure, both must have had the other's
    token at hand, and they must have found their own about as good."""
    gaps = [said["gaps"][row][at] for said in (a, b)]
    if not all(0 <= gap <= NEAR * scale for gap in gaps):
        return f"gap {max(gaps, key=abs):.3f}"
    if not abs(a["logprobs"][row][at] - b["logprobs"][row][at]) <= NEAR * scale:
        return "other logprobs where they part"
    for one, other in ((a, b), (b, a)):
        if "close" in one and other["ids"][row][at] not in one["close"][row][at]:
            return "a token that the other did not think of"
    return None


@dataclass(frozen=True)
class Consistency:
    """Of ``tokens`` said while decoding with what prefill makes of the same text.

    ``verdict``: ``consistent``, or ``differ`` for ``reason``. ``drift``, ``farthest``: mean and largest
    difference of their logprobs, in nats. ``turned``: tokens that decoding said as its best and prefill finds
    worse than its best by more than :data:`NEAR`; ``widest``: the most.
    """

    tokens: int
    turned: int
    widest: float
    drift: float
    farthest: float
    verdict: str
    reason: str | None

    def __str__(self) -> str:
        verdict = f"DIFFERS from prefill ({self.reason})" if self.reason else "agrees with prefill"
        return (
            f"decoding {verdict} on {self.tokens} tokens: logprobs {self.drift:.4f} apart, at most "
            f"{self.farthest:.3f}; {self.turned} turned (at most {self.widest:.3f})"
        )


def consistency(said: Said, outputs: Sequence[Any], scale: float = 1.0) -> Consistency:
    """``outputs``: vLLM's ``RequestOutput`` objects of each prompt followed by its tokens in ``said``, with
    ``prompt_logprobs=1``; of the first requests, if there are fewer. ``scale`` as in :func:`difference`."""
    apart: list[list[float]] = []
    behind: list[float] = []
    for row, output in enumerate(outputs):
        ids, gaps = said["ids"][row], said["gaps"][row]
        scored = output.prompt_logprobs[-len(ids) :] if ids else []
        apart.append([])
        for token, logprob, gap, at in zip(ids, said["logprobs"][row], gaps, scored, strict=True):
            own = at[token].logprob
            apart[-1].append(abs(own - logprob))
            if gap >= 0 or not said["synthetic"]:
                behind.append(max(p.logprob for p in at.values()) - own)
    every = [d for row in apart for d in row]
    turned = sum(not gap <= NEAR * scale for gap in behind)
    reason = _trouble(apart, scale)
    if turned > TURNED * len(every):
        reason = reason or f"{turned} tokens turned"
    return Consistency(
        tokens=len(every),
        turned=turned,
        widest=max(behind, default=0.0),
        drift=sum(every) / max(1, len(every)),
        farthest=max(every, default=0.0),
        verdict="differ" if reason else "consistent",
        reason=reason,
    )


def by_prefill(
    llm: Any, prompts: Sequence[Sequence[int]], said: Said, scale: float, **options: Any
) -> Consistency:
    """Gives prompts and what was said to them to vLLM's ``LLM`` again; ``prompts``: token ids, of all
    requests or of the first ones. ``options`` go to ``generate``. vLLM makes logprobs of whole prompts:
    memory."""
    from vllm import SamplingParams

    once = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
    tokens = zip(prompts, said["ids"][: len(prompts)], strict=True)
    asked = [{"prompt_token_ids": [*prompt, *ids]} for prompt, ids in tokens]
    return consistency(said, llm.generate(asked, once, use_tqdm=False, **options), scale)
