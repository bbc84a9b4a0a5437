"""The check that a module passes on the GPU before it serves, here on kernels made of the reference."""

import math
from types import SimpleNamespace

import pytest
from test_surface import make_plan

from vllm_specpatch.kernels import probe, reference, spec_mask
from vllm_specpatch.kernels.spec_mask import Spec

torch = pytest.importorskip("torch")

SPECS = [
    Spec(head_dim=64, group_size=4, max_q_len=8),
    Spec(head_dim=64, group_size=1, dtype_q="float16", dtype_kv="float8_e5m2", max_q_len=1, window=True),
    Spec(head_dim=64, group_size=2, masks=("causal", "full"), max_q_len=40, window=True),
    Spec(head_dim=64, group_size=4, dtype_kv="float8_e4m3fn", max_q_len=8, soft_cap=True),
    Spec(head_dim=64, group_size=4, masks=("causal", "bits"), words=True, max_q_len=100),
]


@pytest.fixture
def kernels(monkeypatch):
    """Makes plans and runs of the reference, rounded as the kernels round. ``wrong`` changes what a run is
    given: a function of the arguments of ``reference.attention``."""
    made = SimpleNamespace(wrong=lambda given: None, after=lambda out: None, plans=[])

    class Plan:
        def __init__(self, module, **shape):
            spec = module.spec
            assert shape["mask"] in spec.masks and shape["window_left"] >= -1
            assert shape["window_left"] < 0 or spec.window
            self.module, self.shape = module, shape
            made.plans.append(self)

        def update(self, seq_lens, query_start_loc):
            self.lengths = seq_lens.tolist(), query_start_loc.tolist()

    def run(plan, q, k_cache, v_cache, page_table, *, mask, out, soft_cap, k_scale, v_scale):
        seq_lens, start = plan.lengths
        words = None if mask is None else [w % 2**64 for w in mask.tolist()]
        given = {
            "q": q,
            "k_cache": k_cache,
            "v_cache": v_cache,
            "page_table": page_table,
            "seq_lens": seq_lens,
            "query_start_loc": start,
            "mask": plan.shape["mask"],
            "words": words,
            "window_left": plan.shape["window_left"],
            "soft_cap": soft_cap,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        made.wrong(given)
        with torch.device("cpu"):
            got, _ = reference.attention(**given)
        out[: start[-1]] = got[: start[-1]].to(out.dtype)
        made.after(out)

    monkeypatch.setattr(spec_mask, "Plan", Plan)
    monkeypatch.setattr(spec_mask, "run", run)
    return made


def check(spec):
    return probe.check(SimpleNamespace(spec=spec), "cpu")


@pytest.mark.parametrize("spec", SPECS, ids=Spec.describe)
def test_right_kernels_pass(kernels, spec):
    runs = check(spec)
    seen = [(p.shape["mask"], spec.tile(p.shape["max_q_len"]), p.shape["split"]) for p in kernels.plans]
    kinds = {(mask, tile, split) for mask in spec.masks for tile in spec.tiles for split in ("auto", 64)}
    assert set(seen) == kinds and len(seen) == runs
    # Words are optional for causal kernels that have them: those run with and without.
    assert runs == len(kinds) + (2 * len(spec.tiles) if spec.words else 0)


@pytest.mark.parametrize("spec", SPECS, ids=Spec.describe)
def test_run_takes_what_it_is_given(spec, monkeypatch):
    """The checks of the real run(), which no batch may fail for its shape; the launch is recorded."""
    launches = []

    def plan(module, *, device, mask, split, **shape):
        made = make_plan(mask, module.spec, group_size=module.spec.group_size, **shape)
        made.shape["tile_q"] = module.spec.tile(shape["max_q_len"])
        # The rule of Plan.
        assert shape["max_q_len"] <= shape["max_rows"] <= shape["max_requests"] * shape["max_q_len"]
        made.update = lambda seq_lens, start: launches.append(start.tolist()[-1])
        return made

    monkeypatch.setattr(spec_mask, "Plan", plan)
    for mask, tile, with_words, split in probe.cases(spec):
        batch = probe.Batch(spec, mask, tile, with_words, seed=0)
        # Nothing is written, so everything is as wrong as can be.
        assert math.isnan(batch.error(SimpleNamespace(spec=spec), split, torch.device("cpu")))
        assert launches[-1] == sum(batch.q_lens)
    assert len(launches) >= 2 * len(spec.tiles)


def see_one_more(given):
    given["mask"], given["words"] = "bits", [(1 << (r + 2)) - 1 for q in (8, 0, 4, 1) for r in range(q)]


WRONG = {
    "a row sees the next token": see_one_more,
    "no mask": lambda given: given.update(mask="full"),
    "another page": lambda given: given.update(page_table=given["page_table"].flip(1)),
    "one token less": lambda given: given.update(seq_lens=[max(n - 1, 0) for n in given["seq_lens"]]),
    "heads of another request": lambda given: given.update(q=given["q"].roll(1, 0)),
    "another KV head": lambda given: given.update(k_cache=given["k_cache"].flip(2)),
    "values of another head": lambda given: given.update(v_cache=given["v_cache"].flip(2)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_wrong_kernels_do_not(kernels, wrong):
    kernels.wrong = wrong
    with pytest.raises(probe.WrongResults, match="causal masks, query tile .* on cpu: wanted .* found "):
        check(SPECS[0])


@pytest.mark.parametrize(
    ("spec", "name", "value"),
    [
        (SPECS[1], "window_left", -1),
        (SPECS[1], "k_scale", 1.0),
        (SPECS[3], "v_scale", 1.0),
        (SPECS[3], "soft_cap", 0.0),
        (SPECS[4], "words", None),
    ],
    ids=["window", "k_scale", "v_scale", "soft cap", "words"],
)
def test_an_option_that_is_ignored_is_noticed(kernels, spec, name, value):
    kernels.wrong = lambda given: given.update(
        {name: value, **({"mask": "causal"} if name == "words" else {})}
    )
    with pytest.raises(probe.WrongResults):
        check(spec)


def test_nan_and_rows_of_no_request_are_noticed(kernels):
    kernels.after = lambda out: out[0].fill_(float("nan"))
    with pytest.raises(probe.WrongResults, match="found nan"):
        check(SPECS[0])
    kernels.after = lambda out: out[-1].zero_()
    with pytest.raises(probe.WrongResults, match="found inf"):
        check(SPECS[0])


def test_the_callers_defaults_do_not_matter(kernels):
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert check(SPECS[0]) == 2 * len(SPECS[0].tiles)
    finally:
        torch.set_default_dtype(torch.float32)
