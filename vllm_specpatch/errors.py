"""The exceptions of the package. Nothing else of it raises in a user's vLLM process."""


class SpecPatchError(RuntimeError):
    """A broken promise or a defect of ours: always loud."""


class Refused(SpecPatchError):
    """``VLLM_SPECPATCH=strict`` and the patches do not apply; the text says wanted, found and next step."""
