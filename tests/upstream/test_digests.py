"""Every digest of patches/digests.py, on the sources of every supported release. Nothing is imported."""

import pytest
import releases
from packaging.specifiers import SpecifierSet

from vllm_specpatch import fingerprint, gate
from vllm_specpatch.kernels.build import SUPPORTED_FLASHINFER, check_flashinfer
from vllm_specpatch.patches.digests import FLASHINFER_DECODE_DIGESTS, VLLM_DIGESTS
from vllm_specpatch.patches.native import FIRST_FLASHINFER
from vllm_specpatch.patches.v1_attention_backends_flashinfer import PATCH

TABLE = releases.table()
FLASHINFERS = list(dict.fromkeys(row.flashinfer for row in TABLE.values()))
HAVE_NATIVE = [v for v in FLASHINFERS if v in SpecifierSet(f">={FIRST_FLASHINFER}")]


def folder(name, version):
    try:
        return releases.unpacked(name, version)
    except releases.Unreachable as e:
        pytest.skip(str(e))


def digest(root, symbol):
    module, _, qualname = symbol.partition(":")
    try:
        return fingerprint.of_file(root / (module.replace(".", "/") + ".py"), qualname)
    except fingerprint.NoSymbol:
        return fingerprint.ABSENT


def wrong(table, root, started):
    """symbol -> (wanted, found), where the digest of a release is not the last one that started by then."""
    found = {}
    for symbol, accepted in table.items():
        wanted = [digest for digest, label in accepted.items() if started(label.split()[-1])][-1]
        here = digest(root, symbol)
        if here != wanted:
            found[symbol] = (wanted, here)
    return found


@pytest.mark.parametrize("release", TABLE)
def test_vllm(release):
    order = list(TABLE)
    root = folder("vllm", release)
    assert not wrong(VLLM_DIGESTS, root, lambda start: order.index(start) <= order.index(release))
    here = {symbol: digest(root, symbol) for symbol in VLLM_DIGESTS}
    assert gate.check_sources(VLLM_DIGESTS, here.__getitem__) is None
    if release == order[0]:
        return
    # One function of the release before in it: known, and of another release.
    before = folder("vllm", order[order.index(release) - 1])
    changed = [symbol for symbol in VLLM_DIGESTS if digest(before, symbol) != here[symbol]]
    for symbol in changed if len(changed) > 1 else ():
        mixed = {**here, symbol: digest(before, symbol)}
        assert "not of one release" in gate.check_sources(VLLM_DIGESTS, mixed.__getitem__).reason, symbol


@pytest.mark.parametrize("version", HAVE_NATIVE)
def test_flashinfer(version):
    # Labels may name releases that no vLLM pins (0.6.16 itself): their order is that of versions.
    until = SpecifierSet(f"<={version}")
    assert not wrong(FLASHINFER_DECODE_DIGESTS, folder("flashinfer-python", version), until.contains)


@pytest.mark.parametrize("version", FLASHINFERS)
def test_headers_of_the_kernels(version):
    check_flashinfer(version, folder("flashinfer-python", version) / "flashinfer" / "data")


def test_the_ranges_are_those_of_the_table():
    """No release is promised that is not in the table, and none of the table is left out."""
    for distribution, versions in (("vllm", list(TABLE)), ("flashinfer-python", FLASHINFERS)):
        assert PATCH.versions[distribution] == f">={versions[0]},<={versions[-1]}"
    assert set(FLASHINFERS) <= set(SUPPORTED_FLASHINFER)
