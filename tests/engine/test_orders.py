"""Import, activation and undo in every order, each in a fresh process."""

import itertools

import pytest

STOCK = [
    ["stock gate", "Builder", 1],
    ["stock gate", "Builder", 2],
    ["stock build", 3],
    ["stock plan", 4],
    "inherited",
]
PATCHED = [["patched", x] for x in STOCK]
BOTH = ("toy-gate", "toy-build")


def everywhere(state):
    return dict.fromkeys(BOTH, state)


# step -> its code; a run that activates before the import asserts that the target was not imported yet.
STEPS = {
    "import": "imported()",
    "activate": "activate()",
    "unpatch": "engine.deactivate()",
}
EXPECTED = {
    ("import",): (STOCK, {}),
    ("import", "activate"): (STOCK, everywhere("late")),
    ("activate", "import"): (PATCHED, everywhere("applied")),
    ("import", "unpatch"): (STOCK, {}),
    ("unpatch", "import"): (STOCK, {}),
    ("import", "activate", "unpatch"): (STOCK, everywhere("disabled")),
    ("import", "unpatch", "activate"): (STOCK, {}),
    ("activate", "import", "unpatch"): (STOCK, everywhere("disabled")),
    ("activate", "unpatch", "import"): (STOCK, everywhere("disabled")),
    ("unpatch", "import", "activate"): (STOCK, {}),
    ("unpatch", "activate", "import"): (STOCK, {}),
}


def test_every_order_is_listed():
    orders = {order for n in (1, 2, 3) for order in itertools.permutations(STEPS, n) if "import" in order}
    assert orders == set(EXPECTED)


@pytest.mark.parametrize("order", EXPECTED, ids="-".join)
def test_order(toy, order):
    code = "\n".join(
        f"assert 'toy_target.core' not in sys.modules\n{STEPS[step]}"
        if step == "activate" and "import" not in order[: order.index("activate")]
        else STEPS[step]
        for step in order
    )
    result = toy(code + "\nreport(seen=seen())")
    seen, states = EXPECTED[order]
    assert result["seen"] == seen
    assert result["states"] == states
    assert result["changes"] == (5 - 1 if states == everywhere("applied") else 0)


def test_activating_twice_patches_once(toy):
    result = toy("activate(); activate(); imported(); report(seen=seen(), doors=engine.doors)")
    assert result["seen"] == PATCHED and result["doors"] == ["test", "test"]


def test_a_name_copied_after_activation_is_the_patched_one(toy):
    assert toy("activate()\nfrom toy_target.core import plan\nreport(seen=plan(4))")["seen"] == PATCHED[3]


def test_unpatch_leaves_a_later_foreign_wrapper_alone_and_says_so(toy):
    result = toy(
        """
        activate()
        core = imported()
        ours = core.plan
        core.plan = lambda value: ("foreign", ours(value))
        report(lines=engine.deactivate(), plan=core.plan(4), build=core.Builder().build(3))
        """
    )
    assert result["plan"][0] == "foreign" and result["build"] == ["stock build", 3]
    assert sum("someone else" in line for line in result["lines"]) == 1
    assert sum("restored" in line for line in result["lines"]) == 3


def test_unpatch_leaves_what_is_in_use(toy):
    result = toy(
        """
        from vllm_specpatch.ledger import Ledger
        from vllm_specpatch.patch import Edit
        core, ledger, live = imported(), Ledger(), [True]
        patched = lambda wrapped, instance, args, kwargs: "patched"
        ledger.apply(core, [
            ("toy", Edit("Builder", "build", patched, lambda: bool(live))),
            ("toy", Edit("", "plan", patched)),
        ])
        first = ledger.restore()
        between = core.Builder().build(3), core.plan(4)
        live.clear()
        report(first=first, between=between, second=ledger.restore(), after=core.Builder().build(3))
        """
    )
    assert [line.split(": ")[1] for line in result["first"]] == [
        "restored",
        "kept for what was made while patched",
    ]
    assert result["between"] == ["patched", ["stock plan", 4]]
    assert [line.split(": ")[1] for line in result["second"]] == ["restored"]
    assert result["after"] == ["stock build", 3]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_get_the_patches(toy, tmp_path, method):
    """A spawned worker activates by itself (its own doors); a forked one inherits armed hooks."""
    (tmp_path / "worker.py").write_text(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})

def child(queue, parent_engine=None):
    engine = parent_engine
    if engine is None:
        import os
        sys.path.insert(0, os.environ["TOY_PATH"])
        from vllm_specpatch.hooks import Engine
        engine = Engine("toy_series")
        engine.activate("worker")
    assert "toy_target.core" not in sys.modules
    import toy_target.core
    queue.put(toy_target.core.plan(4))
"""
    )
    result = toy(
        f"""
        import multiprocessing as mp, os
        sys.path.insert(0, {str(tmp_path)!r})
        import worker
        os.environ["TOY_PATH"] = sys.path[1]
        context = mp.get_context({method!r})
        queue = context.Queue()
        activate()
        args = (queue, engine) if {method!r} == "fork" else (queue,)
        process = context.Process(target=worker.child, args=args)
        process.start()
        got = queue.get(timeout=300)
        process.join()
        report(got=got)
        """
    )
    assert result["got"] == PATCHED[3]


# -- a target whose own source calls us (patches/diffs) ----------------------------------------------

IN_SOURCE = "engine.apply_in_source(sys.modules['toy_target.core'])"


@pytest.mark.parametrize(
    ("steps", "seen", "state"),
    [
        (["imported()", IN_SOURCE], PATCHED, "applied"),
        # The entry point, later: nothing is late, nothing is done twice.
        (["imported()", IN_SOURCE, "activate()"], PATCHED, "applied"),
        # The start-up hook as well, and before.
        (["activate()", "imported()", IN_SOURCE], PATCHED, "applied"),
        (["imported()", IN_SOURCE, IN_SOURCE], PATCHED, "applied"),
        (["imported()", IN_SOURCE, "engine.deactivate()", IN_SOURCE], STOCK, "disabled"),
    ],
)
def test_in_source(toy, steps, seen, state):
    result = toy("\n".join(steps) + "\nreport(seen=seen())")
    assert (result["seen"], result["states"]) == (seen, everywhere(state))
    assert result["changes"] == (4 if state == "applied" else 0)


@pytest.mark.parametrize(
    ("environment", "state"),
    [({"VLLM_SPECPATCH": "0"}, "disabled"), ({"TOY_WRONG_DIGEST": "Builder.build"}, "refused")],
)
def test_in_source_asks_the_same_gates(toy, environment, state):
    result = toy(f"imported()\n{IN_SOURCE}\nreport(seen=seen())", **environment)
    assert (result["seen"], result["states"], result["changes"]) == (STOCK, everywhere(state), 0)
