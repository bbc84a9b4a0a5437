"""Real vLLM and real FlashInfer on a simulated GPU, in the pytest process itself.

The installed release; tests/upstream/test_build_on_releases.py runs this folder on the others.
Only what a GPU must do is stubbed: page-locked memory, the compiled attention module (its host plan is
recorded instead of run), and the Triton kernel that copies page indices (done in torch).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: `make test` makes an environment with it", allow_module_level=True)

PLAN_ARGUMENTS = (
    "float_workspace int_workspace pinned_workspace qo_indptr kv_indptr kv_lens total_num_rows batch_size "
    "num_qo_heads num_kv_heads page_size cuda_graph head_dim_qk head_dim_vo causal window_left "
    "fixed_split_size disable_split_kv num_colocated_ctas uniform_q_len"
).split()
#: FlashInfer before 0.6.16 has no uniform_q_len.
PLAN_LENGTHS = (len(PLAN_ARGUMENTS) - 1, len(PLAN_ARGUMENTS))
#: vLLM 0.33 needs no patch on the default one.
GPU = os.environ.get("SPECPATCH_TEST_GPU", "8.6")
FLOAT_WORKSPACE_BYTES, INT_WORKSPACE_BYTES = 1 << 20, 70_000


@dataclasses.dataclass
class Recorder:
    """Stands for FlashInfer's compiled module; keeps what the host plan was asked for."""

    backend: str
    plans: list = dataclasses.field(default_factory=list)

    def plan(self, *args):
        assert len(args) in PLAN_LENGTHS, "FlashInfer's plan has other arguments than this test knows"
        plan = {"uniform_q_len": 0, **dict(zip(PLAN_ARGUMENTS, args, strict=False))}
        for name in ("qo_indptr", "kv_indptr", "kv_lens"):
            plan[name] = plan[name].tolist()  # the buffers are reused by the next step
        self.plans.append(SimpleNamespace(backend=self.backend, **plan))
        return [0] * 15

    def workspace_size(self, *args):
        return FLOAT_WORKSPACE_BYTES, INT_WORKSPACE_BYTES


@pytest.fixture(scope="session")
def vllm_on_gpu():
    import vllm_specpatch
    from vllm_specpatch.patches import simulated_gpu

    assert "vllm" not in sys.modules, "a test outside tests/patches imported vllm in the pytest process"
    os.environ["VLLM_SPECPATCH"] = "auto"
    vllm_specpatch.register()
    simulated_gpu.install(*simulated_gpu.parse_capability(GPU), cubins=False)
    import vllm.v1.attention.backends.flashinfer as backend

    assert vllm_specpatch.status()["patches"]["flashinfer-spec-decode"]["state"] == "applied"
    return backend


def copy_page_indices(page_indices, block_table, _stride, cu_num_blocks, BLOCK_SIZE):
    starts = cu_num_blocks.tolist()
    for row, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        page_indices[start:end] = block_table[row, : end - start]


@pytest.fixture
def recorder_class():
    return Recorder


@pytest.fixture
def recorders(vllm_on_gpu, monkeypatch):
    """backend name -> Recorder, for every compiled module that is asked for."""
    import flashinfer.decode
    import flashinfer.prefill
    import flashinfer.utils
    import torch

    from vllm_specpatch.patches import simulated_gpu

    made: dict[str, Recorder] = {}

    def get_module(backend_name, *_dtypes_and_sizes):
        return made.setdefault(backend_name, Recorder(backend_name))

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    for module in (flashinfer.utils, flashinfer.decode):
        monkeypatch.setattr(
            module, "get_compute_capability", lambda _device: simulated_gpu.parse_capability(GPU)
        )
    for module in (flashinfer.decode, flashinfer.prefill):
        monkeypatch.setattr(module, "get_batch_prefill_module", get_module)

    class Kernel:
        def __getitem__(self, _grid):
            return copy_page_indices

    monkeypatch.setattr(vllm_on_gpu, "_copy_page_indices_kernel", Kernel())
    return made


class Bench:
    """A metadata builder of the tiny model and batches to build with it."""

    def __init__(
        self, backend, recorders, k, kv_cache_dtype="auto", method="eagle", change=None, **engine_arguments
    ):
        import tempfile

        from vllm.config import set_current_vllm_config

        from vllm_specpatch.patches import predict_probe

        self.backend, self.recorders = backend, recorders
        self._folder = tempfile.TemporaryDirectory(prefix="specpatch-test-")
        self.config = predict_probe.engine_config(
            self._folder.name, method, k, kv_cache_dtype, **engine_arguments
        )
        cache = self.config.cache_config
        if getattr(cache, "kv_cache_layout", "") is None:
            cache.kv_cache_layout = "LBNHC"  # from 0.29 the engine core resolves it; vLLM's default
        if change is not None:
            change(self.config)
        self.current = set_current_vllm_config
        with self.current(self.config), predict_probe.simulated_device(True):
            self.spec, self.builder = predict_probe.make_builder(self.config, kv_cache_dtype, "cpu")
        self.layers = list(self.config.compilation_config.static_forward_context)

    def support(self, spec=None, cls=None):
        with self.current(self.config):
            gate = (cls or self.backend.FlashInferMetadataBuilder).get_cudagraph_support
            return gate(self.config, spec or self.spec).name

    def batch(self, q_lens, seq_lens, num_tokens=None, causal=True):
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        num_tokens = int(starts[-1]) if num_tokens is None else num_tokens
        pages = 64
        # Row i holds pages 100 i + 1, 100 i + 2, ...; a padded row holds the null block.
        table = torch.tensor(
            [[100 * (i + 1) + p if n else 0 for p in range(pages)] for i, n in enumerate(seq_lens)],
            dtype=torch.int32,
        )
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=lengths,
            num_reqs=len(q_lens),
            num_actual_tokens=num_tokens,
            max_query_len=max(q_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            causal=causal,
        )

    def build(self, *args, capture=False, **kwargs):
        """(metadata, plans made for it)"""
        common = self.batch(*args, **kwargs)
        before = {name: len(r.plans) for name, r in self.recorders.items()}
        with self.current(self.config):
            if capture:
                metadata = self.builder.build_for_cudagraph_capture(common)
            else:
                metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        plans = [p for name, r in self.recorders.items() for p in r.plans[before.get(name, 0) :]]
        return metadata, plans

    def kv_cache(self, pages):
        """A KV cache of the group as vLLM lays it out, in the shape in which ``forward`` gets it."""
        import torch

        backend, spec = self.backend.FlashInferBackend, self.spec
        if hasattr(backend, "get_kv_cache_shape"):
            shape = backend.get_kv_cache_shape(pages, spec.block_size, spec.num_kv_heads, spec.head_size)
            with self.current(self.config):  # it is cached; whoever is first must have a configuration
                order = backend.get_kv_cache_stride_order()
            flat = torch.zeros([shape[i] for i in order], dtype=spec.dtype)
            return flat.permute([order.index(i) for i in range(len(order))])
        heads_first = self.config.cache_config.kv_cache_layout == "LBHNC"
        inner = (spec.num_kv_heads, spec.block_size) if heads_first else (spec.block_size, spec.num_kv_heads)
        flat = torch.zeros(pages, *inner, 2 * spec.head_size, dtype=spec.dtype)
        return flat if heads_first else flat.transpose(1, 2)


@pytest.fixture(autouse=True)
def proved(monkeypatch):
    """Modules that were checked on the GPU, which is not there: tests/kernels/test_probe.py has the check."""
    from vllm_specpatch.kernels import probe
    from vllm_specpatch.patches import spec_mask_route

    modules = []
    monkeypatch.setattr(probe, "check", modules.append)
    monkeypatch.setattr(spec_mask_route, "_proved", set())
    return modules


class NoPlan:
    """Stands for a plan of the kernels where none is looked at."""

    def __init__(self, module, **shape):
        import torch

        self.partial_o = self.partial_lse = torch.empty(0)


@pytest.fixture
def route(monkeypatch):
    """The class of the only route of ``auto``: native, or spec_mask without its module where the installed
    FlashInfer is too old. test_spec_mask_route.py has spec_mask everywhere."""
    from vllm_specpatch.kernels import spec_mask
    from vllm_specpatch.patches import native, routes, spec_mask_route

    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
    name = "native" if native.NativeRoute.why_not() is None else "spec_mask"
    monkeypatch.setattr(routes, "AUTO", (name,))
    if name == "spec_mask":
        monkeypatch.setattr(spec_mask, "load", lambda spec, before_build=None: SimpleNamespace(spec=spec))
        monkeypatch.setattr(spec_mask, "Plan", NoPlan)
    return routes.ROUTES[name]


class RecordedPlan:
    """The kernels' plan as far as the patches see it: what it was made for and asked to plan, and workspaces
    that grow with the rows. Of the full mask the larger: its kernel may run at another occupancy."""

    def __init__(self, module, **shape):
        import torch

        self.module, self.shape, self.updates = module, shape, []
        rows = shape["max_rows"] * (2 if shape["mask"] == "full" else 1)
        self.partial_o, self.partial_lse = torch.empty(rows, 4, 128), torch.empty(rows, 4)

    def update(self, seq_lens, query_start_loc):
        assert seq_lens.shape[0] + 1 == query_start_loc.shape[0]
        assert seq_lens.shape[0] <= self.shape["max_requests"]
        self.updates.append((seq_lens, query_start_loc))
        self._last = seq_lens.clone(), query_start_loc.clone()

    @property
    def updated(self):
        """What the last update() saw, as lists: reading them there would be the wait that tests look for."""
        return tuple(lengths.tolist() for lengths in self._last)


@pytest.fixture
def loaded(monkeypatch):
    """Specs in the order in which their modules were asked for; nothing is compiled, plans are recorded."""
    from vllm_specpatch.kernels import spec_mask
    from vllm_specpatch.patches import spec_mask_route

    specs = []

    def load(spec, before_build=None):
        specs.append(spec)
        return SimpleNamespace(spec=spec)

    monkeypatch.setattr(spec_mask_route, "module_is_within_reach", lambda: True)
    monkeypatch.setattr(spec_mask, "load", load)
    monkeypatch.setattr(spec_mask, "Plan", RecordedPlan)
    return specs


@pytest.fixture
def set_route(vllm_on_gpu, monkeypatch):
    """Sets VLLM_SPECPATCH_ROUTE for this test."""
    patch = vars(vllm_on_gpu.FlashInferMetadataBuilder)["build"]._self_wrapper.__self__

    def set_(name):
        settings = dataclasses.replace(patch.context.settings, route=name)
        monkeypatch.setattr(patch.context, "settings", settings)

    return set_


@pytest.fixture
def heads_first(vllm_on_gpu):
    """Makes the KV cache HND: returns the ``change`` for :class:`Bench`, and undoes what is global."""
    from vllm.v1.attention.backends import utils

    old = getattr(utils, "set_kv_cache_layout", None)
    if old is not None:
        old("HND")

    def change(config):
        if old is None:  # from 0.29 the engine core resolves it
            config.cache_config.kv_cache_layout = "LBHNC"

    yield change
    if old is not None:
        old(None)


@pytest.fixture
def adaptive(vllm_on_gpu, monkeypatch):
    """Turns on adaptive verification: returns the ``change`` for :class:`Bench`."""
    from vllm_specpatch.patches import seams

    if not seams.graphs_may_be_ragged(vllm_on_gpu.FlashInferMetadataBuilder):
        pytest.skip("before vLLM 0.31")
    # The backend selector asks it which model is being loaded; importing it takes compiled operators.
    compilation = SimpleNamespace(model_tag="backbone")
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", compilation)

    def change(config):
        config.speculative_config.enable_adaptive_verification = True

    return change


@pytest.fixture
def any_route_bench(vllm_on_gpu, recorders):
    """Makes a :class:`Bench` with the routes as they are."""
    return lambda k=3, **options: Bench(vllm_on_gpu, recorders, k, **options)


@pytest.fixture
def bench(any_route_bench, route):
    return any_route_bench
