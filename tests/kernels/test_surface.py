"""Specs, module names and the checks that come before any launch."""

import dataclasses
import subprocess
import sys

import pytest

from vllm_specpatch.kernels import build, spec_mask
from vllm_specpatch.kernels.spec_mask import Plan, Spec, SpecMaskError, run, tile_q

torch = pytest.importorskip("torch")
FI = "0.6.16.post3"
BASE = Spec(head_dim=128, group_size=4)


def test_importing_loads_no_heavy_library():
    code = (
        "import sys\n"
        "from vllm_specpatch.kernels import build, reference, spec_mask\n"
        "heavy = {'torch', 'flashinfer', 'vllm', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_folder_refuses_to_be_the_package_kernels(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", "import kernels"], cwd=build.CSRC.parents[1], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "vllm_specpatch.kernels" in done.stderr


@pytest.mark.parametrize(
    ("packed", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (999, 128)]
)
def test_tile(packed, tile):
    assert tile_q(packed) == tile


def test_tiles_cover_every_q_len():
    for group in range(1, 17):
        spec = Spec(head_dim=128, group_size=group, max_q_len=16)
        assert set(spec.tiles) == {tile_q(n * group) for n in range(1, 17)}
    spec = Spec(head_dim=128, group_size=4, max_q_len=16)
    assert spec.tiles == (16, 32, 64)
    assert [spec.tile(n) for n in (1, 4, 5, 8, 9, 16)] == [16, 16, 32, 32, 64, 64]


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 80},
        {"head_dim": 512},
        {"group_size": 0},
        {"dtype_q": "float32"},
        {"dtype_kv": "int8"},
        {"dtype_kv": "float16"},
        {"masks": ()},
        {"masks": ("tree",)},
        {"max_q_len": 0},
    ],
)
def test_bad_specs_raise(change):
    with pytest.raises(SpecMaskError, match="wanted .* found .*;"):
        dataclasses.replace(BASE, **change)


ARCH = build.Arch.parse("8.6")


def test_uri_depends_on_everything(monkeypatch):
    seen = {build.module_uri(BASE, ARCH, FI)}
    changes = [
        {"head_dim": 64},
        {"dtype_q": "float16", "dtype_kv": "float16"},
        {"dtype_kv": "float8_e5m2"},
        {"window": True},
        {"soft_cap": True},
        {"masks": ("bits",)},
        {"max_q_len": 64},
        {"words": True},
    ]
    for change in changes:
        seen.add(build.module_uri(dataclasses.replace(BASE, **change), ARCH, FI))
    seen.add(build.module_uri(BASE, build.Arch.parse("8.9"), FI))
    seen.add(build.module_uri(BASE, ARCH, "0.6.18"))
    monkeypatch.setattr(build, "source_digest", lambda: "other sources")
    seen.add(build.module_uri(BASE, ARCH, FI))
    assert len(seen) == len(changes) + 4


def test_order_of_masks_does_not_matter(tmp_path):
    specs = [dataclasses.replace(BASE, masks=masks) for masks in (("bits", "causal"), ("causal", "bits"))]
    assert len({build.module_uri(s, ARCH, FI) for s in specs}) == 1
    assert len({build.spec_header(s, ARCH) for s in specs}) == 1


def test_specs_with_the_same_code_share_a_module():
    # Groups 4 and 3 both need the tiles 16 and 32 for 1 to 8 rows.
    a, b = Spec(head_dim=128, group_size=4, max_q_len=8), Spec(head_dim=128, group_size=3, max_q_len=8)
    assert build.module_uri(a, ARCH, FI) == build.module_uri(b, ARCH, FI)


def test_source_digest_sees_every_file(tmp_path, monkeypatch):
    before = build.source_digest()
    for path in build.CSRC.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "CSRC", tmp_path)
    assert build.source_digest() == before
    for path in sorted(tmp_path.iterdir()):
        text = path.read_bytes()
        path.write_bytes(text + b"\n")
        assert build.source_digest() != before
        path.write_bytes(text)


def test_units_of_a_spec(tmp_path):
    spec = Spec(head_dim=128, group_size=4, max_q_len=8, masks=("causal", "bits"))
    sources = build.write_sources(spec, ARCH, tmp_path)
    names = sorted(p.name for p in sources)
    assert names == [
        "binding.cu",
        "unit_bits_16.cu",
        "unit_bits_32.cu",
        "unit_causal_16.cu",
        "unit_causal_32.cu",
    ]
    header = (tmp_path / "spec_mask_spec.h").read_text()
    assert "X(kCausal, 16) X(kCausal, 32) X(kBits, 16) X(kBits, 32)" in header
    assert "kSmemPerSm = 100 * 1024" in header
    stamps = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    build.write_sources(spec, ARCH, tmp_path)
    assert stamps == {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}, "unchanged files were rewritten"


@pytest.mark.parametrize(
    ("text", "name", "sm"),
    [("8.6", "8.6", "86"), ("9.0", "9.0a", "90a"), ("9.0a", "9.0a", "90a"), ("12.0f", "12.0f", "120f")],
)
def test_arch(text, name, sm):
    arch = build.Arch.parse(text)
    assert (arch.name, arch.sm) == (name, sm)


@pytest.mark.parametrize("text", ["7.5", "86", "", "9.9"])
def test_bad_arch(text):
    with pytest.raises(build.BuildError, match="wanted one of"):
        build.Arch.parse(text)


def test_supported_flashinfer():
    """The releases that vLLM 0.24 to 0.33 pin."""
    assert list(build.SUPPORTED_FLASHINFER) == [
        "0.6.12",
        "0.6.13",
        "0.6.14",
        "0.6.16.post3",
        "0.6.18",
        "0.6.18.post1",
        "0.7.0.post1",
        "0.7.2.post1",
    ]
    build.check_flashinfer()


@pytest.mark.parametrize("version", ["9.9.9", "0.6.11", "0.6.16", "0.7.2", "0.8.0"])
def test_unknown_flashinfer_is_refused(version):
    with pytest.raises(
        build.BuildError, match=rf"wanted one of 0\.6\.12, .*, found {version}; use a release"
    ):
        build.check_flashinfer(version)


SPEC_TEXTS = {
    "bf16/fp8_e4m3/128/g4": Spec(head_dim=128, group_size=4, dtype_kv="float8_e4m3fn"),
    "bf16/fp8/128/g4": Spec(head_dim=128, group_size=4, dtype_kv="float8_e4m3fn"),
    "fp16/fp8_e5m2/64/g1/q8": Spec(
        head_dim=64, group_size=1, dtype_q="float16", dtype_kv="float8_e5m2", max_q_len=8
    ),
    "bf16/bf16/256/g6/window/q32/causal+bits/softcap": Spec(
        head_dim=256, group_size=6, window=True, soft_cap=True, max_q_len=32, masks=("causal", "bits")
    ),
    "bf16/bf16/128/g4/causal+bits/words": Spec(
        head_dim=128, group_size=4, masks=("causal", "bits"), words=True
    ),
    "bf16/bf16/96/g4": Spec(head_dim=96, group_size=4),
}


@pytest.mark.parametrize(("text", "spec"), SPEC_TEXTS.items())
def test_spec_texts(text, spec):
    assert build.parse_spec(text) == spec
    assert build.parse_spec(build.spec_text(spec)) == spec


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bf16",
        "bf16/bf16/128",
        "fp32/bf16/128/g4",
        "bf16/int8/128/g4",
        "bf16/bf16/d128/g4",
        "bf16/bf16/128/4",
        "bf16/bf16/128/g",
        "bf16/bf16/128/g4/tree",
        "bf16/bf16/128/g4/q8/q16",
        "bf16/bf16/128/g4/",
        "bf16/fp16/128/g4",
        "bf16/bf16/80/g4",
        "bf16/bf16/512/g4",
        "bf16/bf16/128/g4/tile32",
        "bf16/bf16/128/g0",
    ],
)
def test_bad_spec_texts(text):
    with pytest.raises(build.BuildError, match="wanted .* found .*;") as error:
        build.parse_spec(text)
    assert "\n" not in str(error.value)


def test_compile_errors_are_found_in_the_output():
    output = (
        "ninja: Entering directory `/tmp/error_logs'\n[1/2] nvcc -c /tmp/error/unit.cu -o unit.o\n"
        '/tmp/unit.cu(3): error: identifier "x" is undefined\n\n1 error detected in the compilation.\n'
    )
    said = str(build._compile_error(build.Path("m.so"), BASE, RuntimeError(output)))
    assert 'identifier "x" is undefined' in said
    assert "Entering directory" not in said
    linker = RuntimeError(
        "/usr/bin/ld: cannot find -lcudart: No such file or directory\ncollect2: error: ld returned 1"
    )
    assert "cannot find -lcudart" in str(build._compile_error(build.Path("m.so"), BASE, linker))


def test_changed_headers_are_refused(tmp_path):
    for name in build.HEADERS:
        path = tmp_path / "include" / "flashinfer" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("// edited\n")
    with pytest.raises(build.BuildError, match="digest"):
        build.check_flashinfer(FI, tmp_path)
    (tmp_path / "include" / "flashinfer" / build.HEADERS[0]).unlink()
    with pytest.raises(build.BuildError, match="digest"):
        build.check_flashinfer(FI, tmp_path)


def test_no_compiler_is_one_line(monkeypatch, tmp_path):
    # A module of an earlier run in the user's cache would need no compiler.
    monkeypatch.setattr(build, "cached_library", lambda uri: tmp_path / uri / f"{uri}.so")
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.setattr(build, "prebuilt_folders", list)
    monkeypatch.setattr(build, "flashinfer_version", lambda: FI)
    pytest.importorskip("tvm_ffi")
    with pytest.raises(build.BuildError) as error:
        build.load_module(BASE, ARCH)
    assert "\n" not in str(error.value)
    assert "vllm-specpatch build --arch 8.6" in str(error.value)


def test_prebuilt_is_found_and_a_broken_copy_is_not(tmp_path, monkeypatch):
    uri = build.module_uri(BASE, ARCH, FI)
    folder = tmp_path / uri
    folder.mkdir()
    library, note = folder / f"{uri}.so", folder / f"{uri}.json"
    monkeypatch.setenv(build.PREBUILT_ENV, f"/nowhere:{tmp_path}")
    assert build.find_prebuilt(uri) is None
    library.write_bytes(b"library")
    assert build.find_prebuilt(uri) is None
    note.write_text('{"sha256": "%s"}' % __import__("hashlib").sha256(b"library").hexdigest())
    assert build.find_prebuilt(uri) == library
    library.write_bytes(b"libr")
    assert build.find_prebuilt(uri) is None


def prebuilt(folder, spec, arch=ARCH, version=FI):
    """A folder as prebuild() leaves it, with a library that cannot be loaded."""
    uri = build.module_uri(spec, arch, version)
    library = folder / uri / f"{uri}.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(uri.encode())
    build._write_note(library, spec, arch)
    return library


def test_a_prebuilt_module_with_more_kernels_serves_a_spec_with_fewer(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "flashinfer_version", lambda: FI)
    monkeypatch.setenv(build.PREBUILT_ENV, str(tmp_path))
    small, large = (dataclasses.replace(BASE, max_q_len=n) for n in (2, 16))
    assert set(small.tiles) < set(large.tiles)
    assert build.find_ahead(small, ARCH) is None
    library = prebuilt(tmp_path, large)
    assert build.find_ahead(small, ARCH) == build.find_ahead(large, ARCH) == library
    # Never the other way round, nor for another architecture, FlashInfer, dtype or source.
    assert build.find_ahead(dataclasses.replace(large, masks=("bits", "causal")), ARCH) is None
    assert build.find_ahead(dataclasses.replace(small, dtype_kv="float8_e4m3fn"), ARCH) is None
    assert build.find_ahead(dataclasses.replace(small, window=True), ARCH) is None
    assert build.find_ahead(small, build.Arch.parse("8.9")) is None
    with monkeypatch.context() as other:
        other.setattr(build, "flashinfer_version", lambda: "0.6.18")
        assert build.find_ahead(small, ARCH) is None
    with monkeypatch.context() as other:
        other.setattr(build, "source_digest", lambda: "other sources")
        assert build.find_ahead(small, ARCH) is None
    # Words are more than a spec without them needs, and slower: the last choice.
    words = dataclasses.replace(large, words=True)
    assert build.find_ahead(words, ARCH) is None
    library.unlink()
    slower = prebuilt(tmp_path, words)
    assert build.find_ahead(small, ARCH) == build.find_ahead(words, ARCH) == slower
    library = prebuilt(tmp_path, large)
    assert build.find_ahead(small, ARCH) == library
    slower.unlink()
    library.write_bytes(b"half")
    assert build.find_ahead(small, ARCH) is None


def test_notes_that_cannot_be_read_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "flashinfer_version", lambda: FI)
    for name, text in (("a", "{"), ("b", "{}"), ("c", '{"spec": {"masks": ["causal"], "unknown": 1}}')):
        (tmp_path / f"spec_mask_{name}").mkdir()
        (tmp_path / f"spec_mask_{name}" / f"spec_mask_{name}.json").write_text(text)
    library = prebuilt(tmp_path, BASE)
    assert build.find_covering(dataclasses.replace(BASE, max_q_len=1), ARCH, [tmp_path]) == library


# --- checks before a launch ---------------------------------------------------------------------


class Recorder:
    """Stands in for the module's functions; any call is a launch."""

    def __init__(self):
        self.calls = 0
        self.args = ()

    def __getattr__(self, name):
        def call(*args):
            self.calls += 1
            self.args = args

        return call


def make_plan(mask="causal", spec=BASE, **shape):
    """A plan on the CPU: enough for the checks, which never touch the device."""
    plan = object.__new__(Plan)
    plan.module, plan.mask, plan.device = spec_mask.Module(spec, Recorder()), mask, torch.device("cpu")
    plan.shape = {
        "max_requests": 4,
        "max_rows": 32,
        "max_q_len": 8,
        "group_size": 4,
        "num_kv_heads": 2,
        "tile_q": 64,
        "max_kv_len": 64,
        "page_table_stride": 5,
        "grid": 8,
        "window_left": -1,
        **shape,
    }
    plan.buffer = plan.partial_o = plan.partial_lse = plan._shape = None
    return plan


def arguments(**changes):
    cache = torch.zeros(6, 2, 16, 2, 128, dtype=torch.bfloat16)
    given = {
        "q": torch.zeros(8, 8, 128, dtype=torch.bfloat16),
        "k_cache": cache[:, 0],
        "v_cache": cache[:, 1],
        "page_table": torch.zeros(4, 5, dtype=torch.int32),
    }
    return {**given, **changes}


WITH_WORDS = dataclasses.replace(BASE, words=True)


def test_good_arguments_launch():
    plan = make_plan("causal", WITH_WORDS)
    out = run(plan, **arguments())
    assert plan.module.ffi.calls == 1
    assert out.shape == (8, 8, 128)
    run(plan, **arguments(mask=torch.zeros(8, dtype=torch.int64), k_scale=torch.ones(1), v_scale=2.0))
    hnd = torch.zeros(6, 2, 2, 16, 128, dtype=torch.bfloat16)
    run(plan, **arguments(k_cache=hnd[:, 0], v_cache=hnd[:, 1], layout="HND"))
    assert plan.module.ffi.calls == 3


BF = torch.bfloat16


def halves(cache):
    return {"k_cache": cache[:, 0], "v_cache": cache[:, 1]}


BAD_RUNS = {
    "q heads": {"q": torch.zeros(8, 4, 128, dtype=BF)},
    "q dtype": {"q": torch.zeros(8, 8, 128)},
    "q rows": {"q": torch.zeros(33, 8, 128, dtype=BF)},
    "q stride": {"q": torch.zeros(8, 8, 256, dtype=BF)[:, :, ::2]},
    "q alignment": {"q": torch.zeros(8, 8, 129, dtype=BF)[:, :, 1:]},
    "k dtype": {"k_cache": torch.zeros(6, 16, 2, 128)},
    "k heads": {"k_cache": torch.zeros(6, 16, 4, 128, dtype=BF)},
    "v strides": {"v_cache": torch.zeros(6, 16, 2, 128, dtype=BF)},
    "layout": {"layout": "NDH"},
    "table dtype": {"page_table": torch.zeros(4, 5, dtype=torch.int64)},
    "table stride": {"page_table": torch.zeros(4, 6, dtype=torch.int32)},
    "table rows": {"page_table": torch.zeros(2, 5, dtype=torch.int32)},
    "v device": {"v_cache": torch.zeros(6, 2, 16, 2, 128, dtype=BF, device="meta")[:, 1]},
    "all tokens in one place": {
        "k_cache": torch.zeros(1, 1, 2, 128, dtype=BF).expand(6, 16, 2, 128),
        "v_cache": torch.zeros(1, 1, 2, 128, dtype=BF).expand(6, 16, 2, 128),
    },
    "mask dtype": {"mask": torch.zeros(8, dtype=torch.int32)},
    "mask rows": {"mask": torch.zeros(7, dtype=torch.int64)},
    "soft cap": {"soft_cap": 30.0},
    "out shape": {"out": torch.zeros(8, 8, 64, dtype=BF)},
    "out layout": {"out": torch.zeros(8, 128, 8, dtype=BF).transpose(1, 2)},
    "out alignment": {"out": torch.zeros(8 * 8 * 128 + 1, dtype=BF)[1:].view(8, 8, 128)},
    "lse dtype": {"lse": torch.zeros(8, 8, dtype=BF)},
    "lse shape": {"lse": torch.zeros(8, 4)},
    "scale shape": {"k_scale": torch.zeros(2)},
    "scale dtype": {"v_scale": torch.zeros(1, dtype=BF)},
    "q row stride": {"q": torch.zeros(8, 1028, dtype=BF)[:, :1024].view(8, 8, 128)},
    "q address": {"q": torch.zeros(8 * 1024 + 1, dtype=BF)[1:].view(8, 8, 128)},
    "cache elements": halves(torch.zeros(6, 2, 16, 2, 256, dtype=BF)[..., ::2]),
    "cache strides": halves(torch.zeros(6, 2, 16, 2, 132, dtype=BF)[..., :128]),
    "cache address": halves(torch.zeros(6 * 2 * 16 * 2 * 128 + 1, dtype=BF)[1:].view(6, 2, 16, 2, 128)),
    "v dtype": {"v_cache": torch.zeros(6, 2, 16, 2, 128, dtype=torch.float16)[:, 1]},
    "table columns": {"page_table": torch.zeros(5, 4, dtype=torch.int32).as_strided((4, 2), (5, 2))},
    "out dtype": {"out": torch.zeros(8, 8, 128)},
    "lse layout": {"lse": torch.zeros(8, 8).t()},
    "mask layout": {"mask": torch.zeros(16, dtype=torch.int64)[::2]},
    "sm_scale": {"sm_scale": -1.0},
    "k_scale": {"k_scale": 0.0},
    "q device": {"q": torch.zeros(8, 8, 128, dtype=BF, device="meta")},
    "table device": {"page_table": torch.zeros(4, 5, dtype=torch.int32, device="meta")},
    "scale device": {"k_scale": torch.ones(1, device="meta")},
}


@pytest.mark.parametrize("changes", BAD_RUNS.values(), ids=BAD_RUNS.keys())
def test_bad_arguments_raise_before_a_launch(changes):
    plan = make_plan("causal", WITH_WORDS)
    plan.update(torch.ones(3, dtype=torch.int32), torch.arange(4, dtype=torch.int32))
    run(plan, **arguments())
    launched = plan.module.ffi.calls
    with pytest.raises(SpecMaskError, match=rf"^{next(iter(changes))}: wanted .* found .*; "):
        run(plan, **arguments(**changes))
    assert plan.module.ffi.calls == launched


def test_masks_and_plans_must_agree():
    words = torch.zeros(8, dtype=torch.int64)
    spec = dataclasses.replace(BASE, masks=("bits", "full", "causal"))
    for mask, argument in (("bits", None), ("full", words)):
        with pytest.raises(SpecMaskError, match="mask: wanted"):
            run(make_plan(mask, spec), **arguments(mask=argument))
    with pytest.raises(SpecMaskError, match="at most 64"):
        run(make_plan(max_q_len=65, tile_q=128), **arguments(mask=words))


def test_each_kind_of_mask_has_its_kernel():
    words = torch.zeros(8, dtype=torch.int64)
    spec = dataclasses.replace(BASE, masks=("bits", "causal", "full"), max_q_len=64, words=True)
    for kind, given, mode in (
        ("full", None, 0),
        ("causal", None, 1),
        ("causal", words, 1),
        ("bits", words, 2),
    ):
        plan = make_plan(kind, spec, max_q_len=33, tile_q=128)
        run(plan, **arguments(mask=given))
        assert plan.module.ffi.args[0] == mode
    # The bits kernel has words anyway.
    run(make_plan("bits", dataclasses.replace(spec, words=False)), **arguments(mask=words))
    with pytest.raises(SpecMaskError, match="found one without; load a module with words=True"):
        run(make_plan("causal", BASE), **arguments(mask=words))


def test_tables_too_small():
    with pytest.raises(SpecMaskError, match="rows for 100 tokens"):
        run(make_plan(max_kv_len=100), **arguments())


@pytest.mark.parametrize(
    ("seq_lens", "start"),
    [
        (torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(5, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)),
        (torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(4, dtype=torch.int32)[::2], torch.zeros(3, dtype=torch.int32)),
    ],
)
def test_bad_lengths_raise_before_a_launch(seq_lens, start):
    plan = make_plan()
    with pytest.raises(SpecMaskError, match="wanted .* found .*; "):
        plan.update(seq_lens, start)
    assert plan.module.ffi.calls == 0


@pytest.mark.parametrize(
    "change",
    [
        {"max_requests": 0},
        {"max_requests": 5000},
        {"max_q_len": 17},
        {"max_q_len": 0},
        {"max_rows": 4},
        {"max_rows": 65},
        {"num_kv_heads": 0},
        {"max_kv_len": 0},
        {"max_kv_len": spec_mask.MAX_KV_LEN + 1},
        {"page_table_stride": 0},
        {"mask": "bits"},
        {"window_left": 10},
    ],
)
def test_bad_plans_raise(change):
    good = {
        "num_kv_heads": 2,
        "max_requests": 8,
        "max_rows": 64,
        "max_q_len": 8,
        "max_kv_len": 100,
        "page_table_stride": 10,
    }
    # By name: the device, which is the last thing that is looked at, is wrong in all of them.
    with pytest.raises(SpecMaskError, match=rf"^{next(iter(change))}: wanted .* found .*; "):
        Plan(spec_mask.Module(BASE, Recorder()), device="cpu", **{**good, **change})


def test_unpack_follows_the_layout(planner):
    shape = dict.fromkeys(spec_mask.SHAPE_FIELDS, 0)
    shape.update(
        max_requests=3,
        max_rows=6,
        max_q_len=2,
        group_size=4,
        num_kv_heads=2,
        tile_q=16,
        granule=16,
        min_chunk=128,
        window_left=-1,
        max_kv_len=1000,
        page_table_stride=9,
        wave_ctas=5,
        num_sms=20,
    )
    shape, elements, _ = planner.complete(shape)
    lists = planner.plan(shape, [400, 900, 5], [0, 2, 4, 6], planner.buffer(elements), elements)
    assert lists["kv_len"] == [400, 900, 5]
    assert lists["q_start"] == [0, 2, 4]


def test_a_module_with_the_soft_cap_needs_one():
    with pytest.raises(SpecMaskError, match="^soft_cap: wanted"):
        run(make_plan(spec=dataclasses.replace(BASE, soft_cap=True)), **arguments())


def test_the_launch_gets_layout_and_scales_in_their_places():
    k, v = torch.ones(1), torch.full((1,), 2.0)
    hnd = torch.zeros(6, 2, 2, 16, 128, dtype=BF)
    for layout, caches in (("NHD", {}), ("HND", halves(hnd))):
        plan = make_plan()
        run(plan, **arguments(**caches, layout=layout, k_scale=k, v_scale=3.0))
        assert plan.module.ffi.args[8] is (layout == "HND")
        assert plan.module.ffi.args[-5:-3] == (1.0, 3.0) and plan.module.ffi.args[-3] is k
        assert plan.module.ffi.args[-2] is None
        run(plan, **arguments(**caches, layout=layout, k_scale=0.5, v_scale=v))
        assert plan.module.ffi.args[-5:-3] == (0.5, 1.0)
        assert plan.module.ffi.args[-3] is None and plan.module.ffi.args[-2] is v


def test_an_empty_entry_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for value in ("", f"{build.os.pathsep}/elsewhere"):
        monkeypatch.setenv(build.PREBUILT_ENV, value)
        prebuilt(tmp_path, BASE)
        assert all(folder.is_absolute() for folder in build.prebuilt_folders())
