"""doctor: facts from injected probes, what follows from them, and one real run from a hostile folder."""

import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_specpatch import doctor, fingerprint
from vllm_specpatch.patch import Patch

SMI = """\
0, GPU-1a2b, NVIDIA GeForce RTX 3090, 8.6, 580.95.05, 24576
1, GPU-3c4d, NVIDIA GeForce RTX 3090, 8.6, 580.95.05, 24576
2, GPU-5e6f, NVIDIA H200, 9.0, 580.95.05, 143771
"""
TOY = Patch(
    name="toy",
    target="toy.target",
    versions={"vllm": ">=0.27.0,<=0.27.1", "flashinfer-python": ">=0.6.16,<=0.6.18"},
    digests={"toy.target:f": {"a" * 64: "0.27.1"}, "toy.target:g": {"b" * 64: "0.27.1"}},
    edits=lambda module, context: [],
)
KNOWN = {"toy.target:f": "a" * 64, "toy.target:g": "b" * 64}
VERSIONS = {"vllm": "0.27.1", "flashinfer-python": "0.6.16.post3", "torch": "2.13.0"}
REQUIRES = [
    "torch==2.13.0",
    "FlashInfer_Python==0.6.16.post3",
    'torch==1.0; extra == "old"',
    "not a requirement !",
]
APPLIED = {"state": "applied", "reason": "2 attributes wrapped", "wanted": "", "found": "", "next_step": ""}
STATUS = {"doors": ["start-up hook", "vllm.general_plugins entry point"], "patches": {"toy": APPLIED}}


class Machine:
    """A machine to look at. ``smi``: what nvidia-smi prints; ``child``: what the fresh process reports."""

    def __init__(self, tmp_path, smi=SMI, child=None, **changes):
        self.smi, self.child, self.commands = smi, {"status": STATUS} if child is None else child, []
        nvcc = tmp_path / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.touch()
        self.probes = doctor.Probes(
            **{
                "environ": {"CUDA_HOME": str(tmp_path / "cuda")},
                "run": self.run,
                "version": VERSIONS.get,
                "requires": lambda name: REQUIRES,
                "which": lambda name: f"/usr/bin/{name}",
                "folder_of": lambda name: None,
                "plugins": lambda: {"specpatch": "vllm_specpatch:register", "lora": "vllm.lora:register"},
                "patches": lambda: [TOY],
                "digest": KNOWN.__getitem__,
                "home": tmp_path,
                "default_nvcc": "/nonexistent/nvcc",
                **changes,
            }
        )

    def run(self, command, timeout=0):
        self.commands.append(command)
        if "nvidia-smi" in command[0]:
            return (0, self.smi) if self.smi is not None else (-1, "No such file or directory")
        if command[-1] == "--version":
            return 0, "Cuda compilation tools, release 13.0, V13.0.88\nBuild cuda_13.0.r13.0"
        if isinstance(self.child, str):
            return 1, self.child
        return 0, "INFO 11-30 04:05:13 [a.py:1] noise\nRESULT " + json.dumps(self.child) + "\n"

    def facts(self, **options):
        facts = doctor.collect(self.probes, **options)
        assert json.loads(json.dumps(facts)) == facts  # plain data, and nothing that JSON changes
        return facts

    def findings(self, **options):
        return doctor.examine(self.facts(**options))


def environ(tmp_path, **more):
    return {"CUDA_HOME": str(tmp_path / "cuda"), **more}


def test_a_machine_where_all_is_well(tmp_path):
    machine = Machine(tmp_path, smi=SMI.splitlines()[0])
    facts = machine.facts()
    assert doctor.examine(facts) == [] and doctor.exit_code([]) == 0
    assert facts["driver"] == "580.95.05" and facts["toolkit"]["release"] == "13.0.88"
    assert facts["pins"] == {"torch": "==2.13.0", "flashinfer-python": "==0.6.16.post3"}
    text = doctor.render(facts, [], doctor.advise(facts))
    assert "sm_86, NVIDIA GeForce RTX 3090, 24 GiB" in text and "vLLM pins ==0.6.16.post3: matches" in text
    assert "start-up hook and vllm.general_plugins entry point opened" in text
    assert "toy: applied" in text and "nothing is wrong" in text
    assert all(len(line) <= doctor.WIDTH for line in text.splitlines())


def test_a_machine_with_nothing_at_all(tmp_path):
    machine = Machine(
        tmp_path,
        smi=None,
        environ={},
        version=lambda name: None,
        requires=lambda name: [],
        which=lambda name: None,
        plugins=dict,
    )
    facts = machine.facts()
    findings = doctor.examine(facts)
    assert doctor.exit_code(findings) == 2 and {f.level for f in findings} == {"unknown"}
    assert "vLLM is not installed" in findings[0].text
    assert all(command[0] != sys.executable for command in machine.commands)  # nobody to ask
    text = doctor.render(facts, findings, doctor.advise(facts))
    assert "not installed" in text and "None" not in text


# -- GPUs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, capability",
    [
        *(("8.6", (8, 6)), ("sm_86", (8, 6)), ("SM89", (8, 9)), ("90", (9, 0)), ("sm_90a", (9, 0))),
        *(("120", (12, 0)), ("12.1", (12, 1))),
        *((bad, None) for bad in ("", "8", "ampere", "[N/A]", "8.66", "0.0", "-8.6", "sm_")),
    ],
)
def test_capability(text, capability):
    assert doctor.capability_of(text) == capability


def test_several_kinds_of_gpus(tmp_path):
    machine = Machine(tmp_path)
    facts = machine.facts()
    assert [gpu["capability"] for gpu in facts["gpus"]] == [[8, 6], [8, 6], [9, 0]]
    findings = doctor.examine(facts)
    assert any("several kinds (sm_86, sm_90)" in f.text for f in findings) and doctor.exit_code(findings) == 0
    text = doctor.render(facts, findings, "")
    assert "2 x sm_86, NVIDIA GeForce RTX 3090, 24 GiB (index 0, 1)" in text
    assert "sm_90, NVIDIA H200, 140 GiB (index 2)" in text


def test_rows_that_nvidia_smi_cannot_fill():
    rows = "0, GPU-1, NVIDIA GB10, 12.1, 580.95, [N/A]\n1, GPU-2, Tesla K80, [N/A], 470.1, 11441\n\nno, x\n"
    [gpu] = doctor.gpus_from_smi(rows)
    assert gpu["capability"] == [12, 1] and gpu["memory_mib"] is None


@given(st.text(max_size=200))
def test_no_text_of_nvidia_smi_raises(text):
    for gpu in doctor.gpus_from_smi(text):
        assert len(gpu["capability"]) == 2
    doctor.capability_of(text)


@pytest.mark.parametrize(
    "environ, left",
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "2"}, [0, 1, 2]),  # CUDA would call the H200 0: the number says nothing
        ({"CUDA_VISIBLE_DEVICES": "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-3c,GPU-5e6f"}, [1, 2]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0c757cd7-9d3e-5f1a"}, [0, 1, 2]),
    ],
)
def test_visible_devices(environ, left):
    assert [gpu["index"] for gpu in doctor.visible(doctor.gpus_from_smi(SMI), environ)] == left


def test_hidden_gpus_are_named(tmp_path):
    machine = Machine(tmp_path, environ=environ(tmp_path, CUDA_VISIBLE_DEVICES=""))
    assert any("hides all 3 GPUs" in f.text for f in machine.findings())


def test_torch_is_asked_when_nvidia_smi_is_missing(tmp_path):
    gpu = {
        "index": 0,
        "uuid": None,
        "name": "NVIDIA L4",
        "driver": None,
        "capability": [8, 9],
        "memory_mib": 23034,
    }
    machine = Machine(tmp_path, smi=None, child={"status": STATUS, "gpus": [gpu]})
    facts = machine.facts()
    assert facts["gpus"] == [gpu] and facts["gpu_source"] == "torch"
    (present := Machine(tmp_path)).facts()
    asked = [
        json.loads(c[-1])["gpus"] for m in (machine, present) for c in m.commands if c[0] == sys.executable
    ]
    assert asked == [True, False]  # no CUDA context is made for nothing


def test_torch_is_asked_without_vllm_as_well(tmp_path):
    gpu = {"index": 0, "uuid": None, "name": "L4", "driver": None, "capability": [8, 9], "memory_mib": None}
    machine = Machine(tmp_path, smi=None, child={"gpus": [gpu]}, version={"torch": "2.13.0"}.get)
    facts = machine.facts()
    assert facts["gpus"] == [gpu] and facts["vllm_process"] == {}
    [asked] = [json.loads(c[-1]) for c in machine.commands if c[0] == sys.executable]
    assert asked["vllm"] is False and asked["gpus"] is True


def test_a_named_gpu_replaces_those_here(tmp_path):
    facts = Machine(tmp_path, smi=None).facts(gpu="8.6", kv_cache_dtype="fp8")
    assert [gpu["capability"] for gpu in facts["gpus"]] == [[8, 6]]
    assert doctor.exit_code(doctor.examine(facts)) == 0


def test_quick_starts_no_python(tmp_path):
    machine = Machine(tmp_path)
    facts = machine.facts(fresh=False)
    assert all(command[0] != sys.executable for command in machine.commands)
    assert doctor.state_of(facts, "toy")["state"] == "fits"


# -- versions and files --------------------------------------------------------------------------


def versions(**changes):
    table = {**VERSIONS, **{name.replace("_", "-"): version for name, version in changes.items()}}
    return table.get


def child(**changes):
    return {"status": {**STATUS, **changes}}


def refused(reason="vllm 0.28.0 is outside the supported range"):
    return {"status": {**STATUS, "patches": {"toy": {**APPLIED, "state": "refused", "reason": reason}}}}


#: What is the matter: changes of the machine, then level and words of the finding that must appear.
CASES = {
    "cubin of another release": (
        {"version": versions(flashinfer_cubin="0.6.15")},
        "wrong",
        "refuses to be imported",
    ),
    "cubin, FlashInfer 0.7": (
        {"version": versions(flashinfer_cubin="0.6.15", flashinfer_python="0.7.2.post1")},
        "note",
        "FlashInfer ignores it",
    ),
    "jit-cache of another release": (
        {"version": versions(flashinfer_jit_cache="0.6.16.post2+cu130")},
        "wrong",
        "flashinfer-jit-cache 0.6.16.post2+cu130 does not match",
    ),
    "not the pin": (
        {"version": versions(flashinfer_python="0.6.17")},
        "note",
        "is not what vLLM 0.27.1 pins",
    ),
    "no FlashInfer": ({"version": versions(flashinfer_python=None)}, "wrong", "FlashInfer is not installed"),
    "CPU torch": ({"version": versions(torch="2.13.0+cpu")}, "wrong", "torch is a CPU build"),
    "old release": (
        {"version": versions(vllm="0.26.0"), "child": {"error": "x"}},
        "wrong",
        "vllm 0.26.0 is outside the supported range",
    ),
    "refused": ({"child": refused()}, "wrong", "toy refused: vllm 0.28.0 is outside"),
    "changed file": (
        {"digest": {**KNOWN, "toy.target:g": "c" * 64}.__getitem__, "child": {}},
        "wrong",
        "toy.target:g (sha256 cccccccccccc…)",
    ),
    "patched on top": (
        {"child": {**child(), "changed_since": ["toy.target:f: kept, someone else has changed it since"]}},
        "wrong",
        "another package patched on top of us: toy.target:f",
    ),
    "no door": ({"child": child(doors=[])}, "wrong", "neither door opened"),
    "one door": (
        {"child": child(doors=["vllm.general_plugins entry point"])},
        "note",
        "start-up hook did not run",
    ),
    "strict": ({"child": {"error": "Refused: vllm-specpatch 0.1.0: too new"}}, "wrong", "strict stops vLLM"),
    "broken vLLM": ({"child": "Traceback\nImportError: libcudart.so.13"}, "unknown", "libcudart.so.13"),
    "crash without a word": ({"child": ""}, "unknown", "exit code 1"),
    "broken backend": (
        {"child": {**child(), "not_imported": {"toy.target": "ImportError: x"}}},
        "unknown",
        "toy.target does not import here",
    ),
    "old GPU": ({"smi": "0, GPU-1, Tesla T4, 7.5, 580.1, 15360"}, "wrong", "needs sm_80 or later"),
    "Hopper": ({"smi": SMI.splitlines()[2]}, "note", "decodes through XQA"),
    "other plugin": ({"plugins": lambda: {"foo": "foo.bar:baz"}}, "note", "other vLLM plugins here: foo"),
}


@pytest.mark.parametrize("case", CASES)
def test_findings(tmp_path, case):
    changes, level, words = CASES[case]
    facts = Machine(tmp_path, **changes).facts()
    findings = doctor.examine(facts)
    assert [f.level for f in findings if words in f.text] == [level], findings
    levels = {f.level for f in findings}
    assert doctor.exit_code(findings) == (1 if "wrong" in levels else 2 if "unknown" in levels else 0)
    assert doctor.render(facts, findings, doctor.advise(facts))


@pytest.mark.parametrize(
    "variables, level, words",
    [
        ({"VLLM_PLUGINS": "foo"}, "note", "the start-up hook does the work"),
        ({"VLLM_SPECPATCH": "0"}, "note", "switched off"),
        ({"VLLM_SPECPATCH": "maybe"}, "wrong", "is not a valid value"),
        ({"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, "note", "do not read it"),
    ],
)
def test_findings_about_variables(tmp_path, variables, level, words):
    findings = Machine(tmp_path, environ=environ(tmp_path, **variables)).findings()
    assert [f.level for f in findings if words in f.text] == [level], findings


def test_our_own_plugin_in_VLLM_PLUGINS_is_no_news(tmp_path):
    assert not [
        f
        for f in Machine(tmp_path, environ=environ(tmp_path, VLLM_PLUGINS="foo, specpatch")).findings()
        if "VLLM_PLUGINS" in f.text
    ]


def test_a_matching_jit_cache_wheel_carries_the_CUDA_release(tmp_path):
    changed = versions(flashinfer_jit_cache="0.6.16.post3+cu130", flashinfer_cubin="0.6.16.post3")
    assert not [f for f in Machine(tmp_path, version=changed).findings() if "does not match" in f.text]


def test_nothing_to_run_flashinfer_with(tmp_path):
    bare = {"environ": {}, "which": lambda name: None}
    assert [f.level for f in Machine(tmp_path, **bare).findings() if "nothing to run" in f.text] == ["wrong"]
    prebuilt = versions(flashinfer_jit_cache="0.6.16.post3+cu130")
    assert not [
        f for f in Machine(tmp_path, version=prebuilt, **bare).findings() if "nothing to run" in f.text
    ]


def test_refused_where_vllm_does_it_itself_is_a_note(tmp_path):
    table = {
        "version": versions(vllm="0.33.0"),
        "child": refused("vllm 0.33.0 is outside the supported range"),
    }
    machine = Machine(tmp_path, smi=SMI.splitlines()[0], **table)
    findings = machine.findings()
    assert [f.level for f in findings if "does the same by itself" in f.text] == ["note"]
    assert not [f for f in findings if f.level == "wrong"]


def test_jit_cache(tmp_path):
    empty = doctor.jit_cache(tmp_path, "0.6.16")
    assert (empty["exists"], empty["modules"], empty["writable"]) == (False, {}, True)
    root = tmp_path / ".cache" / "flashinfer"
    for release, folder, name in (
        ("0.6.16", "86", "a"),
        ("0.6.16", "86", "b"),
        ("0.6.16", "90a", "a"),
        ("0.6.9", "86", "a"),
    ):
        library = root / release / folder / "cached_ops" / name / f"{name}.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"x" * 2**20)
    (root / "0.6.16" / "86" / "cached_ops" / "half").mkdir()  # a build that did not finish
    found = doctor.jit_cache(tmp_path, "0.6.16")
    assert found["modules"] == {"86": 2, "90a": 1} and found["size_mib"] == 3.0
    assert found["other_versions"] == ["0.6.9"]
    (tmp_path / "file" / ".cache").mkdir(parents=True)
    (tmp_path / "file" / ".cache" / "flashinfer").write_text("not a folder")
    assert doctor.jit_cache(tmp_path / "file", "0.6.16")["modules"] == {}


def test_prebuilt_modules_are_listed(tmp_path):
    for uri in ("spec_mask_sm86_x", "spec_mask_sm90_y"):
        (tmp_path / "kernels" / uri).mkdir(parents=True)
        (tmp_path / "kernels" / uri / f"{uri}.so").touch()
    (tmp_path / "kernels" / "other").mkdir()
    (tmp_path / "kernels" / "other" / "leftover.so").touch()
    variables = environ(tmp_path, VLLM_SPECPATCH_KERNELS=f"/nonexistent{os.pathsep}{tmp_path / 'kernels'}")
    assert Machine(tmp_path, environ=variables).facts()["prebuilt"] == [
        "spec_mask_sm86_x",
        "spec_mask_sm90_y",
    ]


def test_a_toolkit_of_another_CUDA_major(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.13.0'\ncuda: Optional[str] = '12.9'\n")
    machine = Machine(tmp_path, folder_of=lambda name: tmp_path / name)
    assert any("torch was built for CUDA 12.9" in f.text for f in machine.findings())


def test_digest_on_disk_reads_without_importing(tmp_path, monkeypatch):
    package = tmp_path / "doctor_toy"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "part.py").write_text("class A:\n    def f(self):\n        return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    digest = doctor.digest_on_disk("doctor_toy.part:A.f")
    assert digest == fingerprint.digest_of_text("    def f(self):\n        return 1\n")
    assert "doctor_toy" not in sys.modules
    assert doctor.digest_on_disk("doctor_toy.part:A.g") == fingerprint.ABSENT
    for missing in ("doctor_toy.absent:f", "no_such_package.a:f"):
        with pytest.raises(fingerprint.NoSource):
            doctor.digest_on_disk(missing)


def test_commands_run_outside_the_callers_folder():
    code, folder = doctor.run_command([sys.executable, "-c", "import os; print(os.getcwd())"])
    assert code == 0 and folder.strip() != os.getcwd() and not os.path.exists(folder.strip())


def test_run_command_never_raises():
    assert doctor.run_command(["/nonexistent/command"])[0] == -1
    assert doctor.run_command([sys.executable, "-c", "import time; time.sleep(9)"], 0.2)[0] == -1
    assert (
        doctor.run_command([sys.executable, "-c", "print('\\udcff'.encode('utf-8', 'surrogateescape'))"])[0]
        == 0
    )


# -- advice --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, capability, takes",
    [
        ("auto", (8, 6), ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
        ("fp8", (8, 6), ["FLASHINFER"]),
        ("fp8_e5m2", (8, 0), ["FLASHINFER"]),
        ("fp8_e4m3", (8, 9), ["FLASHINFER", "TRITON_ATTN"]),
        ("fp8", (9, 0), ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"]),
        ("fp8_e5m2", (9, 0), ["FLASHINFER", "TRITON_ATTN"]),
        ("fp8", (12, 0), ["FLASHINFER", "TRITON_ATTN"]),
        ("nvfp4", (10, 0), ["FLASHINFER"]),
        ("nvfp4", (8, 6), []),
        ("auto", (7, 5), []),
    ],
)
def test_backends(dtype, capability, takes):
    assert doctor.backends_for(dtype, capability) == takes


@pytest.mark.parametrize(
    "vllm, gpu, dtype, applied, starts, contains",
    [
        ("0.27.1", "sm_86", "fp8", True, "Keep FlashInfer, patched", "nor does any other backend"),
        ("0.27.1", "sm_89", "fp8", True, "Keep FlashInfer, patched", "TRITON_ATTN would"),
        ("0.27.1", "sm_86", "auto", True, "Keep FlashInfer, patched", "--attention-backend FLASH_ATTN"),
        ("0.26.0", "sm_86", "auto", False, "Switch to FLASH_ATTN", "--attention-config.backend FLASH_ATTN"),
        ("0.26.0", "sm_86", "fp8", False, "Get the patch to apply", "--kv-cache-dtype auto"),
        ("0.33.0", "sm_86", "fp8", False, "Keep FlashInfer as it is", "causal drafters"),
        ("0.29.0", "sm_120", "auto", False, "Keep FlashInfer as it is", "XQA"),
        ("0.29.0", "sm_90", "auto", False, "Switch to FLASH_ATTN", "sm_90"),
        ("0.27.1", "sm_75", "auto", True, "FlashInfer and FLASH_ATTN in vLLM", "nothing to patch"),
        (None, "sm_86", "auto", False, "There is no vLLM", "advice"),
    ],
)
def test_advice(tmp_path, vllm, gpu, dtype, applied, starts, contains):
    machine = Machine(tmp_path, version=versions(vllm=vllm), child=child() if applied else refused("no"))
    advice = doctor.advise(machine.facts(gpu=gpu, kv_cache_dtype=dtype))
    assert advice.startswith(starts) and contains in advice


def test_switched_off_counts_as_unpatched(tmp_path):
    off = Machine(tmp_path, environ=environ(tmp_path, VLLM_SPECPATCH="0"), child=child(doors=[], patches={}))
    assert doctor.advise(off.facts(gpu="sm_86")).startswith("Switch to FLASH_ATTN")
    assert not [f for f in off.findings() if "neither door" in f.text]


def test_there_is_advice_for_every_machine(tmp_path):
    gpus = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", None)
    dtypes = ("auto", "bfloat16", "fp8", "fp8_e5m2", "nvfp4", "int4_per_token_head")
    for vllm, applied in itertools.product((None, "0.27.1", "0.33.0", "0.28.0rc1", "weird"), (True, False)):
        table = {"version": versions(vllm=vllm), "child": child() if applied else refused("no"), "smi": None}
        machine = Machine(tmp_path, **table)
        for gpu, dtype in itertools.product(gpus, dtypes):
            facts = machine.facts(gpu=gpu, kv_cache_dtype=dtype)
            advice = doctor.advise(facts)
            assert advice.endswith(".") and "None" not in advice
            assert doctor.render(facts, doctor.examine(facts), advice)


# -- for real ------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_in_a_folder_full_of_traps_with_another_plugin_allowed(clean_environment, tmp_path):
    """The caller's folder shadows vLLM, torch and the package; VLLM_PLUGINS shuts the second door."""
    for name in ("vllm", "torch", "flashinfer", "vllm_specpatch"):
        (tmp_path / f"{name}.py").write_text(
            "raise SystemExit('the trap in the working folder was imported')\n"
        )
    command = [pathlib.Path(sys.executable).parent / "vllm-specpatch", "doctor", "--gpu", "sm_86", "--json"]
    if not command[0].exists():
        command[:1] = [sys.executable, "-P", "-m", "vllm_specpatch.cli"]
    done = subprocess.run(
        [*command, "--kv-cache-dtype", "fp8"],
        cwd=tmp_path,
        env=clean_environment(VLLM_PLUGINS="somebody_else"),
        capture_output=True,
        text=True,
        timeout=600,
    )
    report = json.loads(done.stdout)
    process = report["facts"]["vllm_process"]
    assert process["status"]["doors"] == ["start-up hook"] and process["changed_since"] == []
    assert {p["state"] for p in process["status"]["patches"].values()} == {"applied"}
    assert all(p["refusal"] is None and not p["unknown_sources"] for p in report["facts"]["patches"])
    assert report["advice"].startswith("Keep FlashInfer, patched")
    assert any("start-up hook does the work" in f["text"] for f in report["findings"])
    assert done.returncode in (0, 1)  # 1 where this machine lacks what FlashInfer compiles with
