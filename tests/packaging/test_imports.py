"""The import arrows: patches -> kernels and engine data; the engine reaches patches by strings only."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
# What each folder may import from the project, as dotted prefixes inside vllm_specpatch.
ALLOWED = {
    "vllm_specpatch": {
        "vllm_specpatch." + m
        for m in "bench bench_probe bench_run bootstrap chart checklog cli doctor errors exit_codes "
        "fingerprint gate greedy hooks last_words ledger patch predict random_weights selftest selftest_gpu "
        "selftest_planner settings".split()
    }
    | {"vllm_specpatch"},
    # Data, verdicts and exceptions of the engine; never hooks or the ledger.
    "patches": {"vllm_specpatch", "vllm_specpatch.patch", "vllm_specpatch.errors", "vllm_specpatch.gate"},
    "kernels": set(),
}
OWN = {
    "patches": "vllm_specpatch.patches",
    "kernels": "vllm_specpatch.kernels",
    "vllm_specpatch": "vllm_specpatch",
}
FORBIDDEN_AT_TOP = {"torch", "vllm", "flashinfer"}


def modules(folder):
    return sorted(p for p in (ROOT / folder).glob("*.py"))


def project_imports(path, package):
    """Dotted names of the project's modules that a file imports, relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            if node.module:
                found.add(".".join([*base, node.module]))
            else:
                names = {".".join([*base, a.name]) for a in node.names}
                found |= {n if is_module(n) else ".".join(base) for n in names}
    return {n for n in found if n.split(".")[0] == "vllm_specpatch"}


def is_module(name):
    parts = name.split(".")
    folders = {"patches": ROOT / "patches", "kernels": ROOT / "kernels"}
    if len(parts) > 1 and parts[1] in folders:
        path = folders[parts[1]].joinpath(*parts[2:])
    else:
        path = ROOT.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("folder", ALLOWED)
def test_arrows(folder):
    for path in modules(folder):
        for name in project_imports(path, OWN[folder]):
            own = name == OWN[folder] or name.startswith(OWN[folder] + ".")
            if folder == "vllm_specpatch":
                own = False  # its subpackages start with its own name
            to_kernels = folder == "patches" and name.startswith("vllm_specpatch.kernels")
            assert own or to_kernels or name in ALLOWED[folder], f"{path.name} imports {name}"


def test_the_check_sees_a_forbidden_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("from ..hooks import engine\nfrom . import native\n")
    assert "vllm_specpatch.hooks" in project_imports(bad, "vllm_specpatch.patches")


@pytest.mark.parametrize("folder", ALLOWED)
def test_nothing_heavy_is_imported_at_the_top_of_a_module(folder):
    for path in modules(folder):
        for node in ast.parse(path.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not {n.split(".")[0] for n in names} & FORBIDDEN_AT_TOP, path


def test_engine_mentions_no_patch():
    for path in modules("vllm_specpatch"):
        text = path.read_text()
        assert "flashinfer-spec-decode" not in text and "FlashInferMetadataBuilder" not in text, path
