"""Both doors on real vLLM, in fresh processes."""

import pytest

STATE = """
import json
from vllm_specpatch.patches import simulated_gpu
simulated_gpu.install(8, 6, cubins=False)
{before}
import vllm.v1.attention.backends.flashinfer as backend
import vllm_specpatch
status = vllm_specpatch.status()
gate = vars(backend.FlashInferMetadataBuilder)["get_cudagraph_support"]
print(json.dumps({{
    "doors": status["doors"],
    "state": status["patches"].get("flashinfer-spec-decode", {{}}).get("state"),
    "reason": status["patches"].get("flashinfer-spec-decode", {{}}).get("reason"),
    "wrapped": type(gate).__name__ == "FunctionWrapper",
}}))
"""


def test_the_start_up_door_alone(python):
    """VLLM_PLUGINS names other plugins: vLLM skips our entry point without a word."""
    code = STATE.format(before="from vllm.plugins import load_general_plugins; load_general_plugins()")
    result = python(code, VLLM_PLUGINS="somebody_else")
    assert result["doors"] == ["start-up hook"]
    assert result["state"] == "applied" and result["wrapped"]


def test_both_doors_activate_once(python):
    code = STATE.format(
        before="from vllm.plugins import load_general_plugins; load_general_plugins(); load_general_plugins()"
    )
    result = python(code)
    assert result["doors"][:2] == ["start-up hook", "vllm.general_plugins entry point"]
    assert result["state"] == "applied" and result["wrapped"]


def test_off_leaves_vllm_alone(python):
    result = python(STATE.format(before=""), VLLM_SPECPATCH="0")
    assert not result["wrapped"] and result["doors"] == []


def test_late_when_the_backend_was_imported_before_us(python):
    code = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "VllmWatcher"]  # as with `python -S`
""" + STATE.format(
        before="import vllm.v1.attention.backends.flashinfer, vllm_specpatch; vllm_specpatch.register()"
    )
    result = python(code)
    assert result["state"] == "late" and not result["wrapped"]


def test_a_foreign_patch_on_the_gate_is_refused(python):
    before = """
import wrapt, vllm_specpatch.hooks
def foreign(module):
    builder = module.FlashInferMetadataBuilder
    original = builder.build
    builder.build = lambda self, *a, **k: original(self, *a, **k)
wrapt.importer._post_import_hooks["vllm.v1.attention.backends.flashinfer"].insert(0, foreign)
"""
    result = python(STATE.format(before=before))
    assert result["state"] == "refused" and "FlashInferMetadataBuilder.build" in result["reason"]
    assert not result["wrapped"]


def test_a_foreign_patch_with_strict_stops_the_start(python):
    before = """
import vllm.v1.attention.backends.utils as utils
original = utils.split_decodes_and_prefills
utils.split_decodes_and_prefills = lambda *a, **k: original(*a, **k)
"""
    done = python(STATE.format(before=before), check=False, VLLM_SPECPATCH="strict")
    assert done.returncode == 1
    assert "Refused" in done.stderr and "split_decodes_and_prefills" in done.stderr


def test_unpatch_restores_the_stock_functions(python):
    code = (
        STATE.format(before="")
        + """
lines = vllm_specpatch.unpatch()
from vllm_specpatch import fingerprint
from vllm_specpatch.patches.digests import VLLM_DIGESTS as table
print(json.dumps({"lines": lines, "stock": all(fingerprint.of_symbol(s) in d for s, d in table.items())}))
"""
    )
    result = python(code)
    assert result["stock"] and len(result["lines"]) == 9
    assert all(line.endswith(": restored") for line in result["lines"][:8])
    assert "captured CUDA graphs" in result["lines"][8]


def test_unpatch_leaves_what_a_live_builder_runs_through(python):
    """Stock would plan the verify requests of a builder with our threshold as so many single tokens."""
    result = python(
        """
        import gc, json, tempfile
        import vllm_specpatch
        from vllm_specpatch.patches import predict_probe, simulated_gpu
        simulated_gpu.install(8, 6, cubins=False)
        predict_probe.assume_spec_mask_module()
        import vllm.v1.attention.backends.flashinfer as backend
        from vllm.config import set_current_vllm_config

        def make():
            config = predict_probe.engine_config(tempfile.mkdtemp(), "eagle", 3, "auto")
            with set_current_vllm_config(config), predict_probe.simulated_device(True):
                return predict_probe.make_builder(config, "auto", "cpu")[1]

        builder = make()
        first = vllm_specpatch.unpatch()
        later = make()
        threshold = builder.reorder_batch_threshold, later.reorder_batch_threshold
        route = builder.specpatch_route is not None, getattr(later, "specpatch_route", None) is not None
        del builder, later
        gc.collect()
        second = vllm_specpatch.unpatch()
        print(json.dumps({"first": first, "second": second, "threshold": threshold, "route": route}))
        """
    )
    assert result["threshold"] == [4, 1] and result["route"] == [True, False]
    kept = [line.split(":")[1] for line in result["first"] if "kept for what was made" in line]
    assert "FlashInferMetadataBuilder.build" in kept and len(kept) == 6
    assert "FlashInferMetadataBuilder.__init__" not in kept
    assert [line.endswith(": restored") for line in result["second"]] == [True] * 6 + [False]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_engine_core_like_workers(python, tmp_path, method):
    """vLLM starts its engine core and workers by spawn or fork; each must end patched."""
    (tmp_path / "child.py").write_text(
        """
def child(queue):
    import vllm_specpatch
    from vllm_specpatch.patches import simulated_gpu
    import sys
    if "vllm" not in sys.modules:
        simulated_gpu.install(8, 6, cubins=False)
    import vllm.v1.attention.backends.flashinfer
    queue.put(vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["state"])
"""
    )
    result = python(
        f"""
        import json, multiprocessing as mp, sys
        sys.path.insert(0, {str(tmp_path)!r})
        from vllm_specpatch.patches import simulated_gpu
        simulated_gpu.install(8, 6, cubins=False)   # the front end has imported vllm
        import child
        context = mp.get_context({method!r})
        queue = context.Queue()
        process = context.Process(target=child.child, args=(queue,))
        process.start()
        print(json.dumps(queue.get(timeout=300)))
        process.join()
        """
    )
    assert result == "applied"


def test_the_installed_sources_are_the_known_ones(python):
    """Digests of files and of imported objects agree, for every symbol of the tables."""
    code = (
        STATE.format(before="import vllm_specpatch; vllm_specpatch.unpatch()")
        + """
import flashinfer.decode, sys
from vllm_specpatch import fingerprint
from vllm_specpatch.patches.digests import FLASHINFER_DECODE_DIGESTS, VLLM_DIGESTS
table = {**VLLM_DIGESTS, **FLASHINFER_DECODE_DIGESTS}
wrong = []
for symbol, accepted in table.items():
    module, _, qualname = symbol.partition(":")
    loaded = fingerprint.of_symbol(symbol)
    try:
        on_disk = fingerprint.of_file(sys.modules[module].__file__, qualname)
    except fingerprint.NoSymbol:
        on_disk = fingerprint.ABSENT
    if loaded != on_disk or loaded not in accepted:
        wrong.append(symbol)
print(json.dumps({"wrong": wrong, "checked": len(table)}))
"""
    )
    result = python(code)
    assert result["wrong"] == [] and result["checked"] >= 20
