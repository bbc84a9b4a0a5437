"""The series: what is patched, in order. Importing this imports no patch and no vLLM.

One file per patched vLLM module, named after it. ``decision.py`` is pure; ``routes.py`` chooses who serves
a multi-token decode batch, ``spec_mask_route.py`` and ``native.py`` are those who can; ``seams.py`` has what
differs between vLLM releases, ``digests.py`` the sources that were read. ``diffs/`` is for those who build
vLLM from source.
"""

if __name__ == "patches":
    raise ImportError(
        "this folder is the package vllm_specpatch.patches; Python found it as a top-level 'patches' "
        "because it was started in the repository root (use `python -P`, or another folder)"
    )

from ..patch import Entry

SERIES = (
    Entry(
        name="flashinfer-spec-decode",
        module=f"{__name__}.v1_attention_backends_flashinfer",
        target="vllm.v1.attention.backends.flashinfer",
    ),
)
